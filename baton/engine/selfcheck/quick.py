"""Speed of the engine in a few seconds: against ``dense.py``, and prefill beside decoding.

For `baton doctor` and for `roles: auto`, which runs it in a separate process:

    python -m baton.engine.selfcheck.quick MODEL [--threads N] [--dtype bf16] ...
"""

import json
import statistics
import time
from typing import Annotated, NamedTuple

import torch
import typer

from baton.engine.cpu.native.library import choose_native
from baton.engine.llm import DEFAULT_MODEL
from baton.engine.loading.open import load_weights
from baton.engine.numerics import Numerics, numerics_of
from baton.engine.selfcheck.dense import DenseLlama
from baton.engine.selfcheck.engine_under_test import WARM_TOKENS, EngineUnderTest
from baton.model.artifact import resolve_model
from baton.types.geometry import BLOCK_TOKENS

PROMPT_TOKENS = 128
BATCH = 4
_ROUNDS = 2
_STEPS = 4
_MIXED_BATCH = 8
_MIXED_PROMPTS = 4
_MIXED_CONTEXT = 64
_MIXED_PROMPT_TOKENS = 512


class Speed(NamedTuple):
    """Speed of the engine as a multiple of the dense program's."""

    prefill: float
    decode: float


class NoPeerError(ValueError):
    """The dense program supports only plain Llama shapes."""


def measure(model: str, dtype: str, threads: int) -> Speed:
    """Compare engine and dense program in this process; restore torch's number of threads.

    Raises:
        ModelError: The model cannot be loaded.
        NoPeerError: The dense program cannot run this model.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _measure(model, dtype)
    finally:
        torch.set_num_threads(before)


def _measure(model: str, dtype: str) -> Speed:
    artifact = resolve_model(model)
    if artifact.config.family != "llama":
        raise NoPeerError(f"the dense program supports Llama, not {artifact.config.family}")
    context = PROMPT_TOKENS + _ROUNDS * _STEPS + 8
    with torch.inference_mode():
        dense = DenseLlama(artifact.config, load_weights(artifact, dtype), BATCH, context)
    blocks = BATCH * -(-(PROMPT_TOKENS + WARM_TOKENS) // BLOCK_TOKENS)
    engine = EngineUnderTest(artifact, dtype, "exact", blocks)
    prompt = torch.randint(artifact.config.vocab_size, (1, PROMPT_TOKENS))
    prefills: list[tuple[float, float]] = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        dense.step(prompt, 0)
        between = time.perf_counter()
        engine.prefill(PROMPT_TOKENS)
        prefills.append((between - began, time.perf_counter() - between))
    names = engine.warm(BATCH, PROMPT_TOKENS // 2)
    tokens = torch.randint(artifact.config.vocab_size, (BATCH, 1))
    steps: list[tuple[float, float]] = []
    for position in range(PROMPT_TOKENS // 2, PROMPT_TOKENS // 2 + _ROUNDS * _STEPS):
        began = time.perf_counter()
        tokens = dense.step(tokens, position)
        between = time.perf_counter()
        engine.step()
        steps.append((between - began, time.perf_counter() - between))
    engine.cancel(names)
    return Speed(_ratio(prefills[1:]), _ratio(steps[_STEPS:]))  # the first ones warm the caches


class Beside(NamedTuple):
    """Effect of a prompt on running responses of the same worker; medians.

    Attributes:
        decode_s: Step of 8 responses alone.
        mixed_s: Step with a part of a prompt beside them.
        prompt_tokens_per_s: Prefill rate of these prompts.
    """

    decode_s: float
    mixed_s: float
    prompt_tokens_per_s: float


def measure_beside(
    model: str, dtype: str, threads: int, *, numerics: Numerics, weights: str, kv: str
) -> Beside:
    """Measure prefill beside decoding; the first prompts calibrate the scheduler."""
    torch.set_num_threads(threads)
    tokens = _MIXED_PROMPT_TOKENS + _MIXED_BATCH * (_MIXED_CONTEXT + WARM_TOKENS)
    engine = EngineUnderTest(
        resolve_model(model), dtype, numerics, 2 * -(-tokens // BLOCK_TOKENS), weights, kv
    )
    engine.warm(_MIXED_BATCH, _MIXED_CONTEXT)
    decode_s = statistics.median(_step_s(engine) for _ in range(_STEPS))
    prompts: list[list[float]] = []
    for _ in range(_MIXED_PROMPTS):
        engine.submit(_MIXED_PROMPT_TOKENS, max_tokens=1)
        steps: list[float] = []
        while len(engine.core.batch.running) > _MIXED_BATCH or engine.core.batch.queue:
            steps.append(_step_s(engine))
        prompts.append(steps)
    calibrated = prompts[_MIXED_PROMPTS // 2 :]
    mixed_s = statistics.median(step_s for steps in calibrated for step_s in steps)
    prompt_s = statistics.median(sum(steps) for steps in calibrated)
    return Beside(decode_s, mixed_s, _MIXED_PROMPT_TOKENS / prompt_s)


def _step_s(engine: EngineUnderTest) -> float:
    began = time.perf_counter()
    engine.step()
    return time.perf_counter() - began


def _ratio(times: list[tuple[float, float]]) -> float:
    dense = statistics.median(dense for dense, _ in times)
    return dense / statistics.median(engine for _, engine in times)


def main(
    model: Annotated[str, typer.Argument()] = DEFAULT_MODEL,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    dtype: Annotated[str, typer.Option()] = "bf16",
    numerics: Annotated[str, typer.Option()] = "exact",
    native: Annotated[str, typer.Option()] = "auto",
    weights: Annotated[str, typer.Option()] = "none",
    kv: Annotated[str, typer.Option()] = "",
) -> None:
    """Print the effect of prefill on decoding as JSON."""
    choose_native(native)
    how = numerics_of(numerics)
    beside = measure_beside(model, dtype, threads, numerics=how, weights=weights, kv=kv)
    typer.echo(json.dumps(beside._asdict()))


if __name__ == "__main__":
    typer.run(main)
