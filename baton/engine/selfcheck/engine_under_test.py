"""Engine for measurements, stepped by the caller."""

import time

import torch

from baton.engine.core.core import EngineCore
from baton.engine.core.scheduler import SchedulerConfig
from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec
from baton.engine.cpu.load import load_model
from baton.engine.cpu.runner import CpuRunner
from baton.engine.cpu.selftest import attention_tiling
from baton.engine.ipc import own_pool
from baton.engine.loading.memory import kv_geometry
from baton.engine.numerics import Numerics
from baton.model.artifact import ModelArtifact
from baton.types.params import SamplingParams

MAX_BATCH = 32
WARM_TOKENS = 1000  # limit of output tokens per measured sequence


class EngineUnderTest:
    """Engine with its scheduler, stepped by the caller."""

    def __init__(
        self,
        artifact: ModelArtifact,
        dtype: str,
        numerics: Numerics,
        blocks: int,
        weights: str = "none",
        kv: str = "",
    ) -> None:
        with torch.inference_mode():
            model = load_model(artifact, dtype, numerics, quantisation=weights)
            tiling = attention_tiling(artifact.config, dtype, numerics, kv)
        geometry = kv_geometry(artifact.config, kv or dtype, blocks)
        runner = CpuRunner(model, own_pool(geometry), geometry, tiling)
        self.core = EngineCore(runner, SchedulerConfig(max_batch_requests=MAX_BATCH))
        self._vocab = artifact.config.vocab_size
        self._count = 0

    def submit(self, prompt_tokens: int, max_tokens: int) -> str:
        """Queue a prompt of random, uncached tokens and return the request's id."""
        self._count += 1
        generator = torch.Generator().manual_seed(self._count)
        prompt = torch.randint(self._vocab, (prompt_tokens,), generator=generator).tolist()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        name = f"bench-{self._count}"
        spec = RequestSpec(
            kind=Kind.FULL, params=params, hash_seed=b"bench", ticket=self._count, cacheable=False
        )
        request = EngineRequest(request_id=name, prompt=prompt, spec=spec)
        self.core.scheduler.submit(request, time.monotonic_ns())
        return name

    def step(self, unbounded: bool = False) -> int:
        """Run one step and return its number of tokens.

        ``unbounded`` hides the step's duration from the scheduler, which limits chunks for
        fairness. This shortens warming up.
        """
        began_ns = time.monotonic_ns()
        plan = self.core.plan(began_ns)
        results = self.core.runner.execute(plan)
        now_ns = time.monotonic_ns()
        self.core.apply(plan, results, now_ns, 1 if unbounded else now_ns - began_ns)
        return sum(len(row.tokens) for row in plan.rows)

    def prefill(self, tokens: int) -> None:
        """Compute one prompt and sample one token."""
        self.submit(tokens, max_tokens=1)
        while self.core.batch.has_work():
            self.step()

    def warm(self, batch: int, context: int) -> list[str]:
        """Run ``batch`` sequences until they decode."""
        names = [self.submit(context, max_tokens=WARM_TOKENS) for _ in range(batch)]
        while self.step(unbounded=True) != batch:
            pass
        return names

    def cancel(self, names: list[str]) -> None:
        """Cancel requests by their ids."""
        for name in names:
            self.core.scheduler.cancel(name)
        self.core.take_events()
