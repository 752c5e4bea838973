"""Executes step plans on CUDA: ``engine.core.plan.ModelRunner`` over ``engine/cuda.py``.

    plan rows      A: chunk of 5      B: decode      C: decode     (as the scheduler wrote them)
    flat rows      A0 A1 A2 A3 A4  B  C                            (the same order)

Tokens without filters, penalties and log-probabilities are drawn on the device; for the others
their row of logits comes to the host, where ``engine/sampling.py`` draws. Kernels never read a page
beyond a sequence's own end, so a neighbour's NaN cannot reach a row, and none is computed twice.
"""

# ruff: noqa: N803, N806 - suffixes such as x_TE give shapes

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields

import torch

from engine import sampling
from engine.core.adapters import AdapterRef
from engine.core.errors import AdapterLoadError, BatonError, InternalError, NumericsError
from engine.core.geometry import KvGeometry
from engine.core.params import SampledToken, SamplingParams
from engine.core.plan import PlanRow, SampleSpec, StepPlan
from engine.cuda import CudaDecoder
from engine.cuda_mirror import PoolMirror
from engine.kernels.attention import Span
from engine.kernels.rows import draw
from engine.numerics import DTYPES


class NoAdapters:
    """The adapters that CUDA serves: none yet."""

    def prepare(self, ref: AdapterRef) -> None:
        """Refuse by name."""
        raise AdapterLoadError(f"adapter {ref.name}: LoRA is not supported on CUDA yet")

    def add(self, ref: AdapterRef, prepared: None) -> None:
        """Never called: nothing can be prepared."""

    def remove(self, digest: str) -> None:
        """Never called: nothing is held."""


class CudaRunner:
    """``engine.core.plan.ModelRunner`` on a GPU (or, in Triton's interpreter, on the CPU).

    Args:
        decoder: Model and pool on the device.
        pool_buffer: Writable memory of ``geometry.pool_bytes`` bytes: the pool that others see.
        geometry: Shape of both pools.
        eos_token_ids: Tokens that end an answer.
    """

    def __init__(
        self,
        decoder: CudaDecoder,
        pool_buffer: memoryview | bytearray,
        geometry: KvGeometry,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._decoder = decoder
        self._geometry = geometry
        self._eos_token_ids = eos_token_ids
        count = geometry.pool_bytes // geometry.itemsize_bytes
        flat = torch.frombuffer(pool_buffer, dtype=DTYPES[geometry.dtype], count=count)
        self._mirror = PoolMirror(flat.view(geometry.shape), decoder.pool)
        self.adapters = NoAdapters()
        self.grammars = None
        self.harvests = False
        self.refused_rows: Mapping[int, BatonError] = {}
        self.mask_ns = 0

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

    def admissible(self, spec: SampleSpec, guesses: Sequence[int]) -> int:
        """All of them: no grammar comes here."""
        return len(guesses)

    @torch.inference_mode()
    def execute(
        self, plan: StepPlan, on_layers_done: Callable[[int], None] | None = None
    ) -> list[list[SampledToken]]:
        """See ``engine.core.plan.ModelRunner``.

        KV reaches the pool that others see at the end of the step: all layers are announced then.
        """
        for row in plan.rows:
            if strange := unknown_fields(row):
                raise InternalError(f"{strange[0]} of a plan's row is not known on CUDA")
        self._mirror.before(plan)
        if not plan.rows:
            return []
        hidden_TE, ends = self._forward(plan)
        sampled = [index for index, row in enumerate(plan.rows) if row.samples]
        finite_T = torch.isfinite(hidden_TE.sum(dim=-1))
        logits_SV = None
        if sampled:
            last = torch.tensor([ends[i] - 1 for i in sampled], device=hidden_TE.device)
            logits_SV = self._decoder.logits(hidden_TE.index_select(0, last))
        drawn = self._draw(plan, sampled, logits_SV)
        self._check(plan, sampled, ends, finite_T, logits_SV)
        self._mirror.after(plan.rows)
        if on_layers_done is not None:
            for done in range(1, self._geometry.num_layers + 1):
                on_layers_done(done)
        results: list[list[SampledToken]] = [[] for _ in plan.rows]
        for index, tokens in zip(sampled, drawn, strict=True):
            results[index] = tokens
        return results

    @torch.inference_mode()
    def hidden(self, plan: StepPlan) -> list[torch.Tensor]:
        """Hidden states ``[len(tokens), E]`` of each row of a plan (self-test and tests)."""
        self._mirror.before(plan)
        hidden_TE, ends = self._forward(plan)
        self._mirror.after(plan.rows)
        pairs = zip(plan.rows, ends, strict=True)
        return [hidden_TE[end - len(row.tokens) : end].cpu() for row, end in pairs]

    def _forward(self, plan: StepPlan) -> tuple[torch.Tensor, list[int]]:
        tokens: list[int] = []
        spans, ends = [], []
        for index, row in enumerate(plan.rows):
            spans.append(Span(len(tokens), row.start, len(row.tokens), index))
            tokens += row.tokens
            ends.append(len(tokens))
        tables = [row.block_ids for row in plan.rows]
        return self._decoder.forward(self._decoder.batch(tokens, spans, tables)), ends

    def _draw(
        self, plan: StepPlan, sampled: Sequence[int], logits_SV: torch.Tensor | None
    ) -> list[list[SampledToken]]:
        """Tokens of the rows that draw, in the order of ``sampled``."""
        if logits_SV is None:
            return []
        found: list[list[SampledToken]] = [[] for _ in sampled]
        simple: list[tuple[int, SampleSpec]] = []
        for row, index in enumerate(sampled):
            specs = plan.rows[index].samples
            if all(on_device(spec) for spec in specs):
                simple += [(row, spec) for spec in specs]
            else:
                raw_SV = logits_SV[row : row + 1].cpu()
                if bool(torch.isfinite(raw_SV.sum())):  # else the step fails, and draws nothing
                    logits = sampling.Logits(raw_SV)
                    found[row] = sampling.sample(logits, [specs], self._eos_token_ids)[0]
        if simple:
            for (row, _), token in zip(simple, self._draw_simple(simple, logits_SV), strict=True):
                found[row].append(SampledToken(token))
        return found

    def _draw_simple(
        self, simple: Sequence[tuple[int, SampleSpec]], logits_SV: torch.Tensor
    ) -> list[int]:
        device = logits_SV.device
        rows = torch.tensor([row for row, _ in simple], device=device)
        specs = [spec for _, spec in simple]
        seeds = [_signed(spec.params.seed) for spec in specs]
        tokens: list[int] = draw(
            logits_SV.index_select(0, rows),
            torch.tensor([s.params.temperature for s in specs], dtype=torch.float64, device=device),
            torch.tensor(seeds, device=device),
            torch.tensor([_signed(spec.choice) for spec in specs], device=device),
            torch.tensor([len(spec.history) for spec in specs], device=device),
        ).tolist()
        return tokens

    def _check(
        self,
        plan: StepPlan,
        sampled: Sequence[int],
        ends: Sequence[int],
        finite_T: torch.Tensor,
        logits_SV: torch.Tensor | None,
    ) -> None:
        finite = finite_T.tolist()
        broken = {
            index
            for index, (row, end) in enumerate(zip(plan.rows, ends, strict=True))
            if not all(finite[end - len(row.tokens) : end])
        }
        if logits_SV is not None:
            fine = torch.isfinite(logits_SV.sum(dim=-1)).tolist()
            broken |= {index for index, ok in zip(sampled, fine, strict=True) if not ok}
        if not broken:
            return
        rows = tuple(sorted(broken))
        good = [row for index, row in enumerate(plan.rows) if index not in broken]
        if good:
            self._mirror.after(good)
        self._mirror.clear(plan.rows[index] for index in rows)
        error = NumericsError(f"NaN or Inf in the logits of {len(rows)} of {len(plan.rows)} rows")
        error.rows = rows  # type: ignore[attr-defined]
        raise error


def on_device(spec: SampleSpec) -> bool:
    """Whether the largest logit, or logit / temperature + noise, is the answer."""
    p = spec.params
    if len(spec.history) - spec.prompt_tokens < p.min_tokens:
        return False
    if unknown_fields(spec):
        return False
    return p == SamplingParams(
        max_tokens=p.max_tokens,
        temperature=p.temperature,
        seed=p.seed,
        n=p.n,
        stop_token_ids=p.stop_token_ids,
        ignore_eos=p.ignore_eos,
        min_tokens=p.min_tokens,
    )


def unknown_fields(part: PlanRow | SampleSpec) -> list[str]:
    """Fields of a plan that are set, and that this runner has never heard of."""
    known = ("sequence_id", "tokens", "start", "block_ids", "samples")
    return [
        field.name
        for field in fields(part)
        if field.default is not MISSING
        and field.name not in known
        and getattr(part, field.name) != field.default
    ]


def _signed(value: int) -> int:
    """The 64 bits of an unsigned number as a signed one."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
