"""Engine without torch or weights, for protocol tests and the simulator.

Its KV is bytes that depend on token, position and layer. A sampled token is a digest of all KV
bytes of the sequence in the pool. A KV transfer that loses, swaps or reuses a single byte therefore
changes the tokens, as with a real model.
"""

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from baton.engine.core.model_runner import GrammarStore, RunnerCapabilities
from baton.engine.core.plan import PlanRow, SampleSpec, StepPlan
from baton.types.errors import AdapterLoadError, BatonError, NumericsError
from baton.types.geometry import KvGeometry
from baton.types.params import AdapterRef, SampledToken
from baton.types.prompt_outputs import POOLINGS, PromptOutputs


class EmulatedAdapters:
    """``AdapterStore`` of digests, which the runner mixes into its KV."""

    def __init__(self) -> None:
        self._held: set[str] = set()

    def prepare(self, ref: AdapterRef) -> None:
        """Check that the adapter's path is a directory."""
        if not Path(ref.path).is_dir():
            raise AdapterLoadError(f"adapter {ref.name}: {ref.path} is not a directory")

    def add(self, ref: AdapterRef, prepared: None) -> None:
        """Add an adapter's digest."""
        self._held.add(ref.digest)

    def remove(self, digest: str) -> None:
        """Remove an adapter's digest."""
        self._held.remove(digest)

    def check(self, plan: StepPlan) -> None:
        """Raise ``RuntimeError`` if a row's adapter is not loaded: a fault of the engine."""
        missing = {row.adapter for row in plan.rows} - self._held - {""}
        if missing:
            raise RuntimeError(f"rows need adapters that are not loaded: {sorted(missing)}")


class EmulatedRunner:
    """``ModelRunner`` over numpy.

    Args:
        vocab_size: Upper bound of sampled token ids.
        token_s: Simulated time per token, slept across the layers.
        nan_after_steps: Fault injection: later steps fail with NaN; 0 for never.
    """

    def __init__(
        self,
        geometry: KvGeometry,
        pool_bytes: memoryview | bytearray,
        vocab_size: int = 256,
        eos_token_ids: tuple[int, ...] = (),
        token_s: float = 0.0,
        nan_after_steps: int = 0,
    ) -> None:
        self.geometry = geometry
        layers, two, blocks, tokens, heads, dim = geometry.shape
        row_bytes = heads * dim * geometry.itemsize_bytes
        self._pool: npt.NDArray[np.uint8] = np.frombuffer(pool_bytes, dtype=np.uint8).reshape(
            layers, two, blocks, tokens, row_bytes
        )
        self._vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.rewritten_rows = ()
        self.refused_rows: Mapping[int, BatonError] = {}
        self.mask_ns = 0
        self._token_s = token_s
        self._nan_after_steps = nan_after_steps
        self._steps = 0
        self.adapters = EmulatedAdapters()
        self.capabilities = RunnerCapabilities(
            prompt_logprobs=True, poolings=POOLINGS, adapters=True
        )
        self.grammars: GrammarStore | None = None
        self._ramp = np.arange(row_bytes, dtype=np.uint64)

    def admissible(self, spec: SampleSpec, draft_tokens: Sequence[int]) -> int:
        """Allow all draft tokens; requests with a grammar are rejected at submit."""
        return len(draft_tokens)

    def execute(
        self, plan: StepPlan, on_layers_done: Callable[[int], None] | None = None
    ) -> list[list[SampledToken]]:
        """Run one step; see ``ModelRunner.execute``."""
        self._steps += 1
        if 0 < self._nan_after_steps < self._steps:
            raise NumericsError(f"NaN in the logits of {len(plan.rows)} rows (fault injection)")
        self.adapters.check(plan)
        for source, target in plan.copies:
            self._pool[:, :, target] = self._pool[:, :, source]
        tokens = sum(len(row.tokens) for row in plan.rows)
        for layer in range(self.geometry.num_layers):
            for row in plan.rows:
                self._write(layer, row)
            if self._token_s:
                time.sleep(self._token_s * tokens / self.geometry.num_layers)
            if on_layers_done:
                on_layers_done(layer + 1)
        for row in plan.rows:
            if row.prompt_outputs is not None:
                self._collect(row, row.prompt_outputs)
        return [self._sample(row) for row in plan.rows]

    def _write(self, layer: int, row: PlanRow) -> None:
        positions = np.arange(row.start, row.start + len(row.tokens))
        texts = (
            f"{token} {position} {layer} {component}{row.adapter}"
            for component in range(2)
            for position, token in enumerate(row.tokens, row.start)
        )
        seeds = np.fromiter((zlib.crc32(text.encode()) for text in texts), dtype=np.uint64)
        seeds = seeds.reshape(2, len(row.tokens), 1)
        block, slot = np.divmod(positions, self.geometry.block_tokens)
        block_ids = np.asarray(row.block_ids)[block]
        self._pool[layer][:, block_ids, slot] = (self._ramp * 31 + seeds) >> 3 & 0xFF

    def _collect(self, row: PlanRow, prompt_outputs: PromptOutputs) -> None:
        count = len(row.tokens)
        wide = prompt_outputs.alternatives or 0
        digests = [self._digest_at(row.block_ids, row.start + i) for i in range(count)]
        targets = (
            prompt_outputs.targets(row.start, count)
            if prompt_outputs.alternatives is not None
            else []
        )
        own = np.array([-(digests[i] % 997 + t % 7) / 64 for i, t in enumerate(targets)])
        ids = np.array([[(t + k) % self._vocab_size for k in range(wide)] for t in targets])
        shape = (len(targets), wide)
        top = own[:, None] - np.arange(wide)
        scores = (
            own.astype(np.float32),
            np.ones(len(targets), np.uint32),
            ids.astype(np.uint32).reshape(shape),
            top.astype(np.float32).reshape(shape),
        )
        rows = np.array([[d % 1000, d // 1000 % 1000, 1.0] for d in digests], np.float32)
        prompt_outputs.take([scores], rows)

    def _sample(self, row: PlanRow) -> list[SampledToken]:
        sampled = []
        end = row.start + len(row.tokens)
        for back, sample in ((back, s) for back, samples in row.samples_by_row() for s in samples):
            digest = self.digest(row.block_ids, end - back)
            noise = f"{digest} {sample.choice if sample.params.temperature else 0}"
            if sample.params.temperature:
                noise += f" {sample.params.seed}"
            token = self._token(zlib.crc32(noise.encode()))
            sampled.append(SampledToken(token, 0.0 if sample.params.logprobs is not None else None))
        return sampled

    def _token(self, number: int) -> int:
        return number % self._vocab_size

    def _digest_at(self, block_ids: Sequence[int], position: int) -> int:
        block, slot = divmod(position, self.geometry.block_tokens)
        return zlib.crc32(self._pool[:, :, block_ids[block], slot].tobytes())

    def digest(self, block_ids: Sequence[int], tokens: int) -> int:
        """Return a digest of the KV of the first ``tokens`` positions.

        Runs of adjacent blocks are read in place: each output token needs the whole KV, and a copy
        would dominate the step time.
        """
        slots = self.geometry.block_tokens
        runs = list(_runs(block_ids[: -(-tokens // slots)]))
        unused = -tokens % slots
        whole = xxhash.xxh3_64()
        for layer in self._pool:
            for component in layer:
                for first, count in runs[:-1]:
                    whole.update(component[first : first + count])
                first, count = runs[-1]
                last = component[first : first + count].reshape(count * slots, -1)
                whole.update(last[: len(last) - unused])
        return whole.intdigest()


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield adjacent blocks as (first block, count)."""
    ids = np.asarray(block_ids, dtype=np.int64)
    ends = np.flatnonzero(np.diff(ids) != 1) + 1
    for run in np.split(ids, ends):
        yield int(run[0]), len(run)
