"""Speed of the engine against ``dense.py``, in a few seconds."""

import statistics
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch

from baton.engine.loading.memory import kv_geometry
from baton.engine.loading.open import load_weights
from baton.engine.selfcheck.dense import DenseLlama
from baton.engine.selfcheck.engine_under_test import WARM_TOKENS, EngineUnderTest
from baton.model.artifact import ModelConfig, resolve_model
from baton.types.geometry import BLOCK_TOKENS

PROMPT_TOKENS = 128
BATCH = 4
READ_BYTES = 1 << 28  # more than the caches hold
_ROUNDS = 2
_STEPS = 4


class Speed(NamedTuple):
    """Speed of the engine as a multiple of the dense program's.

    ``bound_share`` is the least time of a decode step by ``ReadBound``, divided by the actual one.
    """

    prefill: float
    decode: float
    bound_share: float


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
        weights = load_weights(artifact, dtype)
        bound = ReadBound(weights, artifact.config, dtype)
        dense = DenseLlama(artifact.config, weights, BATCH, context)
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
    least_s: list[float] = []
    for position in range(PROMPT_TOKENS // 2, PROMPT_TOKENS // 2 + _ROUNDS * _STEPS):
        began = time.perf_counter()
        tokens = dense.step(tokens, position)
        between = time.perf_counter()
        engine.step()
        steps.append((between - began, time.perf_counter() - between))
        least_s.append(bound.step_s(bound.probe_s(), BATCH, position))
    engine.cancel(names)
    del prefills[0], steps[:_STEPS]  # they warm the caches
    share = statistics.median(least_s) / statistics.median(engine for _, engine in steps)
    return Speed(_ratio(prefills), _ratio(steps), share)


def _ratio(times: list[tuple[float, float]]) -> float:
    dense = statistics.median(dense for dense, _ in times)
    return dense / statistics.median(engine for _, engine in times)


class ReadBound:
    """Time of reading as many bytes as a decode step, in order, with torch's threads.

    A step reads all weights, and the KV of each sequence.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], config: ModelConfig, dtype: str
    ) -> None:
        self._weight_bytes = sum(weight.nbytes for weight in weights.values())
        if "head" in weights:  # of the embeddings, few rows are read
            self._weight_bytes -= weights["embed"].nbytes
        self._token_bytes = kv_geometry(config, dtype, 1).pool_bytes // BLOCK_TOKENS
        self._windows = config.layer_windows or (None,)
        self._memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)

    def probe_s(self) -> float:
        """Read memory once, and return the seconds that it took."""
        began_s = time.perf_counter()
        self._memory.sum()
        return time.perf_counter() - began_s

    def step_s(self, probe_s: float, batch: int, context: int) -> float:
        """Return the least seconds of a step of ``batch`` sequences, by a probe's seconds."""
        tokens = sum(min(window or context, context) for window in self._windows)
        kv_bytes = batch * tokens * self._token_bytes / len(self._windows)
        return probe_s * (self._weight_bytes + kv_bytes) / READ_BYTES
