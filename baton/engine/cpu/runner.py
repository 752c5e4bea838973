"""Executes step plans: one forward pass over the rows of a plan, over one paged KV pool.

    plan rows      A: chunk of 5      B: decode      C: decode      (in the scheduler's order)
    flat rows      C  B  A0 A1 A2 A3 A4                             (decodes first, equal lengths
                                                                     and neighbours together)

Prefill chunks, decodes, and mixtures use the same code. Blocks after a sequence's end may be read
and masked, so NaN in one sequence could reach its neighbour in the pool. Rows with NaN are
therefore computed again, alone and isolated. Rows that are clean then continue. The others fail,
after their KV is zeroed.
"""

# ruff: noqa: N803, N806, N815 - suffixes such as q_THD give shapes

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from baton.engine.core.model_runner import RunnerCapabilities
from baton.engine.core.plan import PlanRow, SampleSpec, StepPlan
from baton.engine.cpu.attention import (
    Attention,
    AttentionTiling,
    PagedAttention,
    QuerySpan,
    slots_of,
)
from baton.engine.cpu.decoder import Decoder
from baton.engine.cpu.kv_codec import kv_codec
from baton.engine.cpu.lora import CpuAdapters, CpuStepDeltas
from baton.engine.cpu.native.attention import NativeAttention, NativeCalls, native_library
from baton.engine.cpu.native.rows import finite_rows
from baton.engine.models.lora import rows_by_adapter
from baton.engine.numerics import DTYPES, not_finite_error
from baton.engine.sampling.grammars import Grammars
from baton.engine.sampling.prompt_scores import collect_rows
from baton.engine.sampling.step_sampler import StepSampler
from baton.types.errors import BatonError
from baton.types.geometry import KvGeometry
from baton.types.params import SampledToken
from baton.types.prompt_outputs import POOLINGS


@dataclass(slots=True)
class _Batch:
    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    decodes: list[QuerySpan]
    chunks: list[QuerySpan]
    ends: list[int]  # where each plan row's flat rows end
    deltas: CpuStepDeltas | None
    rows: Sequence[PlanRow]


class CpuRunner:
    """``baton.engine.core.model_runner.ModelRunner`` over torch, on the CPU.

    Args:
        pool_buffer: Writable, zeroed (or at least finite) memory: all of the pool, or what this
            rank holds of it.
        geometry: Shape of the pool, with the heads of the whole model.
        adapters: LoRA adapters that rows may name; by default an empty set in ``exact``.
        shared_pool: Whether the pool is in files that other processes map.
        cores: Context of each step, which marks this worker's cores as in use.
    """

    def __init__(
        self,
        model: Decoder,
        pool_buffer: memoryview | bytearray,
        geometry: KvGeometry,
        tiling: AttentionTiling,
        eos_token_ids: tuple[int, ...] = (),
        adapters: CpuAdapters | None = None,
        grammars: Grammars | None = None,
        *,
        shared_pool: bool = False,
        cores: AbstractContextManager[object] | None = None,
    ) -> None:
        self.grammars = grammars
        self._cores = cores or nullcontext()
        self.capabilities = RunnerCapabilities(
            prompt_logprobs=True, poolings=POOLINGS, grammars=grammars is not None, adapters=True
        )
        self._sampler = StepSampler(eos_token_ids, grammars)
        self._model = model
        self.adapters = adapters or CpuAdapters(model.config, model.dtype)
        self._shard = model.shard
        self.geometry = geometry
        self.eos_token_ids = eos_token_ids
        self.rewritten_rows: tuple[int, ...] = ()
        held = geometry if self._shard is None else self._shard.held(geometry)
        count = held.pool_bytes // held.itemsize_bytes
        self._codec = kv_codec(geometry, model.dtype)
        dtype = torch.uint8 if self._codec else DTYPES[geometry.dtype]
        flat = torch.frombuffer(pool_buffer, dtype=dtype, count=count)
        self._pool = flat.view(held.shape)
        kv_heads = None
        if self._shard is not None:
            tiling = self._shard.open(geometry, tiling, shared=shared_pool)
            kv_heads = self._shard.heads_in_pool
        self._attention = self._make_attention(held, tiling, kv_heads)
        self._layers = model.native_layers(self._attention)

    def _make_attention(
        self, geometry: KvGeometry, tiling: AttentionTiling, kv_heads: range | None
    ) -> Attention:
        c = self._model.local
        sinks = self._model.sinks
        library = native_library(geometry, self._model.dtype, c.num_heads, c.num_kv_heads)
        if library is not None:
            return NativeAttention(
                library, self._pool, geometry, c.num_heads, tiling, c.layer_windows, kv_heads, sinks
            )
        return PagedAttention(
            self._pool, geometry, c.num_heads, tiling, c.layer_windows, kv_heads, self._codec, sinks
        )

    @property
    def refused_rows(self) -> Mapping[int, BatonError]:
        """Rows of the last plan whose grammar failed, with the error."""
        return self._sampler.refused_rows

    @property
    def mask_ns(self) -> int:
        """Time that the last step spent on grammars."""
        return self._sampler.mask_ns

    @torch.inference_mode()
    def execute(
        self, plan: StepPlan, on_layers_done: Callable[[int], None] | None = None
    ) -> list[list[SampledToken]]:
        """Compute a plan and sample its tokens (``ModelRunner.execute``)."""
        if plan.copies:
            self.copy_blocks(plan.copies)
        self._sampler.begin_step()
        if not plan.rows:
            return []
        with self._cores:
            return self._compute(plan, on_layers_done)

    @torch.inference_mode()
    def copy_blocks(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, ``(from, to)``, on all ranks that have a pool."""
        if self._shard is not None:
            self._shard.begin_copies(blocks)
        for source, target in blocks:
            self._pool[:, :, target].copy_(self._pool[:, :, source])
        if self._shard is not None:
            self._shard.settle()

    def _compute(
        self, plan: StepPlan, on_layers_done: Callable[[int], None] | None
    ) -> list[list[SampledToken]]:
        batch = self._flatten(plan.rows)
        hidden_TE = self._forward(batch, on_layers_done)
        sampled_from = [
            (index, batch.ends[index] - 1 - back)
            for index, row in enumerate(plan.rows)
            for back, _ in row.samples_by_row()
        ]
        broken = self._broken_rows(batch, hidden_TE)
        self.rewritten_rows = tuple(sorted(broken))
        if broken:
            broken = self._retry_isolated(batch, hidden_TE, broken)
        if sampled_from:
            logits = self._model.logits(hidden_TE[[flat_row for _, flat_row in sampled_from]])
            pairs = zip(sampled_from, logits.finite(), strict=True)
            broken |= {index for (index, _), is_finite in pairs if not is_finite}
        collected, unscored = collect_rows(
            self._model, plan.rows, batch.ends, hidden_TE, skipped=broken
        )
        if broken := broken | unscored:
            self.clear([plan.rows[index] for index in broken])
            raise not_finite_error(broken, len(plan.rows))
        for part in collected:
            part.hand_over()
        if not sampled_from:
            return [[] for _ in plan.rows]
        return self._sampler.sample(logits, plan.rows)

    def admissible(self, spec: SampleSpec, draft_tokens: Sequence[int]) -> int:
        """Return how many draft tokens the grammar admits (``ModelRunner.admissible``)."""
        return self._sampler.admissible(spec, draft_tokens)

    @torch.inference_mode()
    def hidden(self, plan: StepPlan) -> list[torch.Tensor]:
        """Return hidden states ``[len(tokens), E]`` of each row of a plan, for self-tests."""
        batch = self._flatten(plan.rows)
        hidden_TE = self._forward(batch, None)
        pairs = zip(batch.ends, plan.rows, strict=True)
        return [hidden_TE[end - len(row.tokens) : end] for end, row in pairs]

    @torch.inference_mode()
    def follow(self, rows: Sequence[PlanRow], *, isolated: bool) -> None:
        """Compute this rank's part of the leader's pass."""
        self._forward(self._flatten(rows), None, isolated=isolated)

    def _forward(
        self,
        batch: _Batch,
        on_layers_done: Callable[[int], None] | None,
        *,
        isolated: bool = False,
    ) -> torch.Tensor:
        attention = self._attention
        shard = self._shard
        if shard is not None:
            shard.forward(batch.rows, isolated=isolated)
        calls = attention.plan(batch.decodes, batch.chunks, isolated=isolated)
        self._model.deltas = batch.deltas
        if self._layers is not None and isinstance(calls, NativeCalls) and batch.deltas is None:
            x_TE, h_TE, rotations = self._model.begin(batch.tokens_T, batch.positions_T)
            self._layers.run(calls, x_TE, h_TE, rotations, on_layers_done)
            return x_TE

        def attend(layer: int, q_THD: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
            attention.write(layer, calls, kv)
            out_TE = attention.run(layer, calls, q_THD)
            return out_TE if shard is None else shard.heads(out_TE)

        return self._model.forward(batch.tokens_T, batch.positions_T, attend, on_layers_done)

    def _flatten(self, rows: Sequence[PlanRow]) -> _Batch:
        attention = self._attention
        singles = [i for i, row in enumerate(rows) if len(row.tokens) == 1]
        singles.sort(key=lambda i: attention.sort_key(rows[i].start, rows[i].block_ids))
        longer = [i for i, row in enumerate(rows) if len(row.tokens) > 1]
        ends = [0] * len(rows)
        tokens = [rows[i].tokens[0] for i in singles]
        positions = [rows[i].start for i in singles]
        decodes = [QuerySpan(n, rows[i].start, 1, rows[i].block_ids) for n, i in enumerate(singles)]
        for flat_row, i in enumerate(singles):
            ends[i] = flat_row + 1
        chunks = []
        for i in longer:
            row = rows[i]
            begin = len(tokens)
            count = len(rows[i].tokens)
            tokens += row.tokens
            positions += range(row.start, row.start + count)
            chunks.append(QuerySpan(begin, row.start, count, row.block_ids))
            ends[i] = len(tokens)
        own_rows = rows_by_adapter(rows, ends)
        deltas = CpuStepDeltas(own_rows, self.adapters) if own_rows else None
        return _Batch(
            torch.tensor(tokens),
            torch.tensor(positions),
            decodes,
            chunks,
            ends,
            deltas,
            rows,
        )

    def _broken_rows(self, batch: _Batch, hidden_TE: torch.Tensor) -> set[int]:
        """Return plan rows with NaN or Inf anywhere: early chunks must not damage KV either."""
        finite_T = finite_rows(hidden_TE)
        if all(finite_T):
            return set()
        broken = set()
        for index, (row, end) in enumerate(zip(batch.rows, batch.ends, strict=True)):
            if not all(finite_T[end - len(row.tokens) : end]):
                broken.add(index)
        return broken

    def _retry_isolated(self, batch: _Batch, hidden_TE: torch.Tensor, broken: set[int]) -> set[int]:
        """Compute rows with NaN again, each alone; return those that caused it."""
        self.clear([batch.rows[index] for index in broken])
        guilty = set()
        for index in sorted(broken):
            row = batch.rows[index]
            end = batch.ends[index]
            again_TE = self._forward(self._flatten((row,)), None, isolated=True)
            hidden_TE[end - len(row.tokens) : end] = again_TE
            if not bool(torch.isfinite(again_TE).all()):
                guilty.add(index)
        return guilty

    @torch.inference_mode()
    def clear(self, rows: Sequence[PlanRow]) -> None:
        """Zero the KV that these rows wrote, on all ranks."""
        if self._shard is not None:
            self._shard.begin_clear(rows)
        tokens = self._pool.flatten(2, 3)  # [layers, 2, slots, heads, elements]
        size = self.geometry.block_tokens
        for row in rows:
            own = slots_of(row.start, len(row.tokens), row.block_ids, size)
            tokens[:, :, torch.from_numpy(own)] = 0
        if self._shard is not None:
            self._shard.settle()
