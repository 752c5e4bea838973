"""Executes step plans on CUDA: ``engine.core.plan.ModelRunner`` over ``engine/cuda/decoder.py``.

    plan rows      A: chunk of 5      B: decode      C: decode     (as the scheduler wrote them)
    flat rows      A0 A1 A2 A3 A4  B  C                            (the same order)

A plan of decodes alone is one captured step (``engine/cuda/decode_graphs.py``); prefill chunks, draft tokens,
adapters, and mixtures are launched kernel by kernel. Kernels never read a page beyond a sequence's
own end, so a neighbour's NaN cannot reach a row, and none is computed twice.
"""

# ruff: noqa: N803, N806, N815 - suffixes such as x_TE give shapes

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.core.errors import BatonError, InternalError, NumericsError
from engine.core.geometry import KvGeometry
from engine.core.params import SampledToken
from engine.core.plan import PlanRow, SampleSpec, StepPlan
from engine.core.prompt_outputs import Floats, PromptOutputs, Scores
from engine.cuda.decode_graphs import DecodeRow, DecodeSteps
from engine.cuda.decoder import CudaDecoder
from engine.cuda.host_pool import HostPoolSync
from engine.cuda.kernels.attention import Span
from engine.cuda.lora import CudaAdapters, DeviceDeltas
from engine.cuda.sampler import Draws, Specs, is_filtered, on_device, unknown_fields
from engine.numerics import DTYPES
from engine.sampling import prompt_scores as scoring
from engine.sampling.grammars import Grammars
from engine.sampling.sample import Logits

_KNOWN = (
    "sequence_id",
    "tokens",
    "start",
    "block_ids",
    "samples",
    "adapter",
    "harvest",
    "num_draft_tokens",
)


@dataclass(frozen=True, slots=True)
class _Head:
    """A decoder's results where scores are computed: the host, as those of drawn tokens are."""

    decoder: CudaDecoder

    def logits(self, x_SE: torch.Tensor) -> Logits:
        return Logits(self.decoder.logits(x_SE.contiguous()).cpu())

    def normed(self, x_SE: torch.Tensor) -> torch.Tensor:
        return self.decoder.normed(x_SE.contiguous())


@dataclass(frozen=True, slots=True)
class _Computed:
    """A step behind its forward pass.

    Attributes:
        hidden_TE: Flat rows.
        ends: Where each plan row's flat rows end.
        broken: Plan rows with NaN or Inf.
        drawn: What was drawn on the device, by number of the draw.
        host: Logits ``[1, V]`` of what the host draws.
    """

    hidden_TE: torch.Tensor
    ends: Sequence[int]
    broken: set[int]
    drawn: dict[int, list[int]]
    host: dict[int, torch.Tensor]


class CudaRunner:
    """``engine.core.plan.ModelRunner`` on a GPU (or, in Triton's interpreter, on the CPU).

    Args:
        decoder: Model and pool on the device.
        pool_buffer: Writable memory of ``geometry.pool_bytes`` bytes: the pool that others see.
        geometry: Shape of both pools.
        eos_token_ids: Tokens that end an answer.
        adapters: What rows may name.
        grammars: For requests with a grammar.
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
        self._geometry = geometry
        self._eos_token_ids = eos_token_ids
        count = geometry.pool_bytes // geometry.itemsize_bytes
        flat = torch.frombuffer(pool_buffer, dtype=DTYPES[geometry.dtype], count=count)
        self._host_pool = HostPoolSync(flat.view(geometry.shape), decoder.pool)
        self._draws = Draws(eos_token_ids, grammars)
        longest = -(-decoder.shape.max_context_tokens // geometry.block_tokens)
        self.steps = DecodeSteps(decoder, longest)
        self.adapters = adapters
        self.grammars = grammars
        self.takes_prompt_outputs = True
        self.refused_rows: Mapping[int, BatonError] = {}

    @property
    def geometry(self) -> KvGeometry:
        """Shape of the pool."""
        return self._geometry

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer unless ``ignore_eos``."""
        return self._eos_token_ids

    @property
    def rewritten_rows(self) -> tuple[int, ...]:
        """None, ever."""
        return ()

    @property
    def mask_ns(self) -> int:
        """Time that the last step spent on grammars."""
        return self._draws.mask_ns

    def admissible(self, spec: SampleSpec, draft_tokens: Sequence[int]) -> int:
        """See ``engine.core.plan.ModelRunner``."""
        return self._draws.admissible(spec, draft_tokens)

    @torch.inference_mode()
    def execute(
        self, plan: StepPlan, on_layers_done: Callable[[int], None] | None = None
    ) -> list[list[SampledToken]]:
        """See ``engine.core.plan.ModelRunner``.

        KV reaches the pool that others see at the end of the step: all layers are announced then.
        """
        for row in plan.rows:
            if strange := unknown_fields(row, _KNOWN):
                raise InternalError(f"{strange[0]} of a plan's row is not known on CUDA")
        self._host_pool.before(plan)
        self.refused_rows, self._draws.mask_ns = {}, 0
        if not plan.rows:
            return []
        captured = all(_decodes_plainly(row) for row in plan.rows)
        done = self._step(plan.rows) if captured else self._launch(plan.rows)
        collected, unscored = self._collect(plan.rows, done)
        if broken := done.broken | unscored:
            self._fail(plan.rows, broken)
        self._host_pool.after(plan.rows)
        if on_layers_done is not None:
            for layers in range(1, self._geometry.num_layers + 1):
                on_layers_done(layers)
        for prompt_outputs, scores, rows_TE in collected:
            prompt_outputs.take(scores, rows_TE)
        results, self.refused_rows = self._draws.finish(plan.rows, done.drawn, done.host)
        return results

    @torch.inference_mode()
    def hidden(self, plan: StepPlan) -> list[torch.Tensor]:
        """Hidden states ``[len(tokens), E]`` of each row of a plan (self-test and tests)."""
        self._host_pool.before(plan)
        hidden_TE, ends = self._forward(plan.rows)
        self._host_pool.after(plan.rows)
        pairs = zip(plan.rows, ends, strict=True)
        return [hidden_TE[end - len(row.tokens) : end].cpu() for row, end in pairs]

    def _step(self, rows: Sequence[PlanRow]) -> _Computed:
        """Decodes alone: one captured step draws for all of them; few need their logits."""
        plain = [_draws_plainly(row.samples) for row in rows]
        self.steps.start([_decode_row(row, here) for row, here in zip(rows, plain, strict=True)])
        self.steps.step()
        tokens: list[int] = self.steps.drawn_R.tolist()
        hidden_RE = self.steps.hidden_RE
        broken = {index for index, token in enumerate(tokens) if token < 0}
        drawn = {index: [tokens[index]] for index, here in enumerate(plain) if here}
        host: dict[int, torch.Tensor] = {}
        others = [index for index, here in enumerate(plain) if not here]
        if others and not broken:
            places = torch.tensor(others, device=hidden_RE.device)
            logits_SV = self._decoder.logits(hidden_RE.index_select(0, places))
            more, host = self._draws.start({i: rows[i].samples for i in others}, logits_SV)
            drawn |= more
        return _Computed(hidden_RE, range(1, len(rows) + 1), broken, drawn, host)

    def _launch(self, rows: Sequence[PlanRow]) -> _Computed:
        """Any rows."""
        hidden_TE, ends = self._forward(rows)
        wanted: list[tuple[int, int, Specs]] = [
            (index, end - 1 - back, specs)
            for index, (row, end) in enumerate(zip(rows, ends, strict=True))
            for back, specs in row.draws()
        ]
        fine: list[bool] = torch.isfinite(hidden_TE.sum(dim=-1)).tolist()
        broken = {
            index
            for index, (row, end) in enumerate(zip(rows, ends, strict=True))
            if not all(fine[end - len(row.tokens) : end])
        }
        drawn: dict[int, list[int]] = {}
        host: dict[int, torch.Tensor] = {}
        if wanted:
            places = torch.tensor([flat for _, flat, _ in wanted], device=hidden_TE.device)
            logits_SV = self._decoder.logits(hidden_TE.index_select(0, places))
            fine = torch.isfinite(logits_SV.sum(dim=-1)).tolist()
            broken |= {index for (index, _, _), ok in zip(wanted, fine, strict=True) if not ok}
            if not broken:
                draws = {number: specs for number, (_, _, specs) in enumerate(wanted)}
                drawn, host = self._draws.start(draws, logits_SV)
        return _Computed(hidden_TE, ends, broken, drawn, host)

    def _forward(self, rows: Sequence[PlanRow]) -> tuple[torch.Tensor, list[int]]:
        tokens: list[int] = []
        spans, ends = [], []
        for index, row in enumerate(rows):
            spans.append(Span(len(tokens), row.start, len(row.tokens), index))
            tokens += row.tokens
            ends.append(len(tokens))
        tables = [row.block_ids for row in rows]
        batch = self._decoder.batch(tokens, spans, tables, self._deltas(rows, ends))
        return self._decoder.forward(batch), ends

    def _deltas(self, rows: Sequence[PlanRow], ends: Sequence[int]) -> DeviceDeltas | None:
        """Which flat rows get which adapter's deltas."""
        groups: dict[str, list[int]] = {}
        for row, end in zip(rows, ends, strict=True):
            if row.adapter:
                groups.setdefault(row.adapter, []).extend(range(end - len(row.tokens), end))
        if not groups:
            return None
        found = [(flat, self.adapters[name]) for name, flat in groups.items()]
        return DeviceDeltas(found, self._decoder.device)

    def _collect(
        self, rows: Sequence[PlanRow], done: _Computed
    ) -> tuple[list[tuple[PromptOutputs, list[Scores], Floats]], set[int]]:
        """What harvests want of this step's rows, and the rows whose logits are not finite."""
        collected, unscored = [], set()
        for index, (row, end) in enumerate(zip(rows, done.ends, strict=True)):
            if row.prompt_outputs is None or index in done.broken:
                continue
            rows_TE = done.hidden_TE[end - len(row.tokens) : end]
            try:
                part = scoring.collect(self._head, row.prompt_outputs, row.start, rows_TE)
            except scoring.NotFiniteError:
                unscored.add(index)
            else:
                collected.append((row.prompt_outputs, *part))
        return collected, unscored

    def _fail(self, plan_rows: Sequence[PlanRow], broken: set[int]) -> None:
        rows = tuple(sorted(broken))
        good = [row for index, row in enumerate(plan_rows) if index not in broken]
        if good:
            self._host_pool.after(good)
        self._host_pool.clear(plan_rows[index] for index in rows)
        error = NumericsError(f"NaN or Inf in the logits of {len(rows)} of {len(plan_rows)} rows")
        error.rows = rows  # type: ignore[attr-defined]
        raise error


def _decodes_plainly(row: PlanRow) -> bool:
    """Whether a captured step computes it: one token, and something to draw."""
    plain = row.prompt_outputs is None and not row.adapter
    return len(row.tokens) == 1 and bool(row.samples) and plain


def _draws_plainly(samples: Specs) -> bool:
    """Whether a captured step draws it."""
    return len(samples) == 1 and on_device(samples[0]) and not is_filtered(samples[0].params)


def _decode_row(row: PlanRow, plain: bool) -> DecodeRow:
    """For a row that does not draw plainly, the token is not looked at."""
    token, spec = row.tokens[0], row.samples[0]
    if not plain:
        return DecodeRow(token, row.start, row.block_ids)
    p = spec.params
    return DecodeRow(token, row.start, row.block_ids, p.temperature, p.seed, spec.choice)
