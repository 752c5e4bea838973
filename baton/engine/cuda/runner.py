"""Executes step plans on CUDA: a ``ModelRunner`` over ``baton/engine/cuda/decoder.py``.

    plan rows      A: chunk of 5      B: decode      C: decode     (in the scheduler's order)
    flat rows      A0 A1 A2 A3 A4  B  C                            (the same order)

A plan of only decodes is one captured step (``baton/engine/cuda/decode_graphs.py``). Prefill
chunks, draft tokens, adapters, and mixtures are launched kernel by kernel. Kernels never read a
page beyond a sequence's own end, so a neighbour's NaN cannot reach a row, and no row is computed
twice.
"""

# ruff: noqa: N803, N806, N815 - suffixes such as x_TE give shapes

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from baton.engine.core.model_runner import RunnerCapabilities
from baton.engine.core.plan import PlanRow, SampleSpec, StepPlan
from baton.engine.cuda.decode_graphs import DecodeRow, DecodeSteps, cuda_graphs
from baton.engine.cuda.decoder import CudaDecoder
from baton.engine.cuda.host_pool import HostPool
from baton.engine.cuda.kernels.attention import Span
from baton.engine.cuda.lora import CudaAdapters, StepDeltas
from baton.engine.cuda.sampler import SampledRows, Specs, is_filtered, is_on_device, start_sampling
from baton.engine.cuda.upload import upload
from baton.engine.models.lora import rows_by_adapter
from baton.engine.numerics import DTYPES, not_finite_error
from baton.engine.sampling.grammars import Grammars
from baton.engine.sampling.prompt_scores import collect_rows
from baton.engine.sampling.sample import Logits
from baton.engine.sampling.step_sampler import StepSampler
from baton.types.errors import BatonError
from baton.types.geometry import KvGeometry
from baton.types.params import SampledToken
from baton.types.prompt_outputs import POOLINGS

_NOTHING_SAMPLED = SampledRows((), {}, {})


@dataclass(frozen=True, slots=True)
class _Head:
    """Results of a decoder on the host, where scores are computed."""

    decoder: CudaDecoder

    def logits(self, x_SE: torch.Tensor) -> Logits:
        return Logits(self.decoder.logits(x_SE.contiguous()).cpu())

    def normed(self, x_SE: torch.Tensor) -> torch.Tensor:
        return self.decoder.normed(x_SE.contiguous())


@dataclass(frozen=True, slots=True)
class _Computed:
    """Results of a forward pass.

    Attributes:
        ends: End of each plan row's flat rows.
        broken: Plan rows with NaN or Inf; then nothing is sampled.
        sampled: Tokens that the device sampled, and the logits of the other rows.
        tokens: All tokens, if the captured step itself sampled one for each row.
    """

    hidden_TE: torch.Tensor
    ends: Sequence[int]
    broken: set[int]
    sampled: SampledRows
    tokens: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class _Expected:
    """Rows of the plan that continues the last captured step: its inputs are on the device."""

    sequences: Sequence[int]
    starts: Sequence[int]
    tokens: Sequence[int]

    def matches(self, rows: Sequence[PlanRow]) -> bool:
        return (
            [row.sequence_id for row in rows] == self.sequences
            and [row.start for row in rows] == self.starts
            and [row.tokens[0] for row in rows] == self.tokens
        )


class CudaRunner:
    """``baton.engine.core.model_runner.ModelRunner`` on a GPU, or on the CPU in the interpreter.

    Args:
        pool_buffer: Writable memory of the host's pool, of ``geometry.pool_bytes`` bytes.
        adapters: LoRA adapters that rows may name.
    """

    def __init__(
        self,
        decoder: CudaDecoder,
        pool_buffer: memoryview | bytearray,
        geometry: KvGeometry,
        eos_token_ids: tuple[int, ...],
        adapters: CudaAdapters,
        grammars: Grammars | None = None,
    ) -> None:
        self._decoder = decoder
        self._head = _Head(decoder)
        self.geometry = geometry
        self.eos_token_ids = eos_token_ids
        count = geometry.pool_bytes // geometry.itemsize_bytes
        flat = torch.frombuffer(pool_buffer, dtype=DTYPES[geometry.dtype], count=count)
        self.host_pool = HostPool(flat.view(geometry.shape), decoder.pool)
        self._sampler = StepSampler(eos_token_ids, grammars)
        longest = -(-decoder.shape.max_context_tokens // geometry.block_tokens)
        capture = cuda_graphs() if decoder.device.type == "cuda" else None
        self.steps = DecodeSteps(decoder, longest, capture=capture)
        self._expected: _Expected | None = None
        self.adapters = adapters
        self.grammars = grammars
        self.capabilities = RunnerCapabilities(
            prompt_logprobs=True, poolings=POOLINGS, grammars=grammars is not None, adapters=True
        )

    @property
    def rewritten_rows(self) -> tuple[int, ...]:
        """Always empty: CUDA never computes rows twice."""
        return ()

    @property
    def refused_rows(self) -> Mapping[int, BatonError]:
        """Rows of the last plan whose grammar failed, with the error."""
        return self._sampler.refused_rows

    @property
    def mask_ns(self) -> int:
        """Time that the last step spent on grammars."""
        return self._sampler.mask_ns

    def admissible(self, spec: SampleSpec, draft_tokens: Sequence[int]) -> int:
        """Return how many draft tokens the grammar admits (``ModelRunner.admissible``)."""
        return self._sampler.admissible(spec, draft_tokens)

    @torch.inference_mode()
    def execute(
        self, plan: StepPlan, on_layers_done: Callable[[int], None] | None = None
    ) -> list[list[SampledToken]]:
        """Compute a plan and sample its tokens (``ModelRunner.execute``).

        Finished blocks reach the host's pool at the end of the step; all layers are announced then.
        """
        self.host_pool.before(plan)
        self._sampler.begin_step()
        if not plan.rows:
            return []
        compute = self._step if all(map(_is_captured, plan.rows)) else self._launch
        try:
            return self._execute(plan.rows, compute, on_layers_done)
        finally:
            self.host_pool.wait()  # the caller announces finished blocks next

    def _execute(
        self,
        rows: Sequence[PlanRow],
        compute: "Callable[[Sequence[PlanRow], bool], _Computed]",
        on_layers_done: Callable[[int], None] | None,
    ) -> list[list[SampledToken]]:
        computed = compute(rows, on_layers_done is not None)
        collected, unscored = collect_rows(
            self._head, rows, computed.ends, computed.hidden_TE, skipped=computed.broken
        )
        if broken := computed.broken | unscored:
            self.host_pool.clear([rows[index] for index in sorted(broken)])
            raise not_finite_error(broken, len(rows))
        if on_layers_done is not None:
            self.host_pool.wait()
            for layers in range(1, self.geometry.num_layers + 1):
                on_layers_done(layers)
        for part in collected:
            part.hand_over()
        if computed.tokens:
            return [[SampledToken(token)] for token in computed.tokens]
        return self._sampler.sample(computed.sampled, rows)

    @torch.inference_mode()
    def hidden(self, plan: StepPlan) -> list[torch.Tensor]:
        """Return hidden states ``[len(tokens), E]`` of each row of a plan, for self-tests."""
        self.host_pool.before(plan)
        hidden_TE, _ = self._forward(plan.rows)
        self.host_pool.after(plan.rows, ends=True)
        self.host_pool.wait()
        ends = itertools.accumulate(len(row.tokens) for row in plan.rows)
        pairs = zip(plan.rows, ends, strict=True)
        return [hidden_TE[end - len(row.tokens) : end].cpu() for row, end in pairs]

    def _step(self, rows: Sequence[PlanRow], ends: bool) -> _Computed:
        """Compute only decodes: a captured step samples for all; few need their logits.

        With ``ends``, blocks that are not full go to the host too.
        """
        expected = self._expected
        self._expected = None
        plain = [True] * len(rows)
        if expected is not None and expected.matches(rows):
            self.steps.resume([row.block_ids for row in rows])
        else:
            plain = [_is_sampled_in_step(row.samples) for row in rows]
            pairs = zip(rows, plain, strict=True)
            self.steps.start([_decode_row(row, is_plain) for row, is_plain in pairs])
        self.steps.step()
        self.host_pool.after(rows, ends=ends)
        tokens: list[int] = self.steps.sampled_R.tolist()
        hidden_RE = self.steps.hidden_RE
        broken = {index for index, token in enumerate(tokens) if token < 0}
        if all(plain) and not broken:
            self._expected = _Expected(
                [row.sequence_id for row in rows], [row.start + 1 for row in rows], tokens
            )
            row_ends = range(1, len(rows) + 1)
            return _Computed(hidden_RE, row_ends, broken, _NOTHING_SAMPLED, tokens)
        on_device = {index: [tokens[index]] for index, is_plain in enumerate(plain) if is_plain}
        host_logits: Mapping[int, torch.Tensor] = {}
        others = [index for index, is_plain in enumerate(plain) if not is_plain]
        if others and not broken:
            places_S = upload(hidden_RE.device, {"places": torch.tensor(others)})["places"]
            logits_SV = self._decoder.logits(hidden_RE.index_select(0, places_S))
            sampled = start_sampling({i: rows[i].samples for i in others}, logits_SV)
            on_device |= sampled.on_device
            host_logits = sampled.host_logits
        every = range(len(rows))
        sampled = SampledRows(every, on_device, host_logits)
        return _Computed(hidden_RE, range(1, len(rows) + 1), broken, sampled)

    def _launch(self, rows: Sequence[PlanRow], ends: bool) -> _Computed:
        row_ends = list(itertools.accumulate(len(row.tokens) for row in rows))
        sampled_from: list[tuple[int, int, Specs]] = [
            (index, end - 1 - back, specs)
            for index, (row, end) in enumerate(zip(rows, row_ends, strict=True))
            for back, specs in row.samples_by_row()
        ]
        hidden_TE, places_S = self._forward(rows, [place for _, place, _ in sampled_from])
        self.host_pool.after(rows, ends=ends)
        flags = torch.isfinite(hidden_TE.sum(dim=-1))
        if sampled_from:
            logits_SV = self._decoder.logits(hidden_TE.index_select(0, places_S))
            flags = torch.cat((flags, torch.isfinite(logits_SV.sum(dim=-1))))
        finite: list[bool] = flags.tolist()
        broken = {
            index
            for index, (row, end) in enumerate(zip(rows, row_ends, strict=True))
            if not all(finite[end - len(row.tokens) : end])
        }
        pairs = zip(sampled_from, finite[row_ends[-1] :], strict=True)
        broken |= {index for (index, _, _), is_finite in pairs if not is_finite}
        sampled = _NOTHING_SAMPLED
        if sampled_from and not broken:
            specs_by_row = {i: specs for i, (_, _, specs) in enumerate(sampled_from)}
            sampled = start_sampling(specs_by_row, logits_SV)
        return _Computed(hidden_TE, row_ends, broken, sampled)

    def _forward(
        self, rows: Sequence[PlanRow], places: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states of the rows' tokens, and ``places`` on the device."""
        tokens: list[int] = []
        spans = []
        ends = []
        for index, row in enumerate(rows):
            spans.append(Span(len(tokens), row.start, len(row.tokens), index))
            tokens += row.tokens
            ends.append(len(tokens))
        own_rows = rows_by_adapter(rows, ends)
        deltas = StepDeltas(own_rows, self.adapters, self._decoder.device) if own_rows else None
        tables = [row.block_ids for row in rows]
        batch = self._decoder.batch(tokens, spans, tables, deltas, places)
        return self._decoder.forward(batch), batch.places_S


def _is_captured(row: PlanRow) -> bool:
    """Return whether a captured step can compute the row: one token, and something to sample."""
    is_plain = row.prompt_outputs is None and not row.adapter
    return len(row.tokens) == 1 and bool(row.samples) and is_plain


def _is_sampled_in_step(samples: Specs) -> bool:
    if len(samples) != 1:
        return False
    return is_on_device(samples[0]) and not is_filtered(samples[0].params)


def _decode_row(row: PlanRow, is_plain: bool) -> DecodeRow:
    """Return a row of the captured step; the token is ignored if it is not sampled there."""
    token = row.tokens[0]
    spec = row.samples[0]
    if not is_plain:
        return DecodeRow(token, row.start, row.block_ids)
    p = spec.params
    return DecodeRow(token, row.start, row.block_ids, p.temperature, p.seed, spec.choice)
