"""Which token each row of a step draws, on the device or on the host.

The device draws the largest logit, or the largest logit / temperature + noise, of all tokens or of
those that ``top_k``, ``top_p`` and ``min_p`` leave. A draw with penalties, log-probabilities or a
grammar has its row of logits brought to the host, where ``engine/sampling/sample.py`` draws. Which of the
two it is depends on the draw alone, never on what else is in the step.
"""

# ruff: noqa: N803, N806 - suffixes such as x_TE give shapes

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields

import torch

from engine.core.errors import GrammarError
from engine.core.params import SampledToken, SamplingParams
from engine.core.plan import PlanRow, SampleSpec
from engine.cuda.decode_graphs import signed
from engine.cuda.kernels.rows import cuts, draw
from engine.sampling import sample as sampling
from engine.sampling import speculative as verifying
from engine.sampling.grammars import Grammars

Specs = tuple[SampleSpec, ...]


@dataclass(frozen=True, slots=True)
class Drawable:
    """Rows of logits, numbered as ``PlanRow.draws`` gives them, plan row by plan row.

    Attributes:
        numbers: The rows.
        drawn: What the device drew, by row.
        host: The logits ``[1, V]`` of all other rows.
    """

    numbers: Sequence[int]
    drawn: Mapping[int, list[int]]
    host: Mapping[int, torch.Tensor]

    def rows(self, indexes: Sequence[int]) -> "Drawable":
        """Some of the rows."""
        return Drawable([self.numbers[i] for i in indexes], self.drawn, self.host)

    def sample(
        self,
        specs: Sequence[Sequence[SampleSpec]],
        eos_token_ids: Sequence[int],
        masks: Sequence[Sequence[sampling.Mask | None]],
    ) -> list[list[SampledToken]]:
        """See ``engine.sampling.sample.sample``."""
        found = []
        for number, wanted, allowed in zip(self.numbers, specs, masks, strict=True):
            if number in self.drawn:
                found.append([SampledToken(token) for token in self.drawn[number]])
            else:
                logits = sampling.Logits(self.host[number])
                found += sampling.sample(logits, [wanted], eos_token_ids, [allowed])
        return found


class Draws:
    """Draws the tokens of steps.

    Args:
        eos_token_ids: Tokens that end an answer.
        grammars: For requests with a grammar.
    """

    def __init__(self, eos_token_ids: Sequence[int], grammars: Grammars | None) -> None:
        self.grammars = grammars
        self.mask_ns = 0  # of the step; whoever begins one sets it back
        self._eos_token_ids = eos_token_ids

    def start(
        self, draws: Mapping[int, Specs], logits_SV: torch.Tensor
    ) -> tuple[dict[int, list[int]], dict[int, torch.Tensor]]:
        """Draw what the device can, and fetch the logits of the rest; waits for both.

        Args:
            draws: What rows draw, by the row's number.
            logits_SV: The logits of these rows, in this order; finite.
        """
        here: list[tuple[int, int, SampleSpec]] = []
        fetched: list[tuple[int, int]] = []
        for place, (number, specs) in enumerate(draws.items()):
            if all(on_device(spec) for spec in specs):
                here += [(place, number, spec) for spec in specs]
            else:
                fetched.append((place, number))
        drawn: dict[int, list[int]] = {}
        if here:
            tokens = _draw([(place, spec) for place, _, spec in here], logits_SV)
            for (_, number, _), token in zip(here, tokens, strict=True):
                drawn.setdefault(number, []).append(token)
        if not fetched:
            return drawn, {}
        places = torch.tensor([place for place, _ in fetched], device=logits_SV.device)
        host_SV = logits_SV.index_select(0, places).cpu()
        return drawn, {number: host_SV[i : i + 1] for i, (_, number) in enumerate(fetched)}

    def finish(
        self,
        rows: Sequence[PlanRow],
        drawn: Mapping[int, list[int]],
        host: Mapping[int, torch.Tensor],
    ) -> tuple[list[list[SampledToken]], dict[int, GrammarError]]:
        """What ``start`` drew and what the host draws, of each plan row as far as it counts."""
        every = Drawable(range(len(drawn) + len(host)), drawn, host)
        return verifying.draw_by(Drawable.sample, every, rows, self._eos_token_ids, self._masks)

    def admissible(self, spec: SampleSpec, draft_tokens: Sequence[int]) -> int:
        """See ``engine.core.plan.ModelRunner``."""
        if self.grammars is None or not spec.params.grammar:
            return len(draft_tokens)
        try:
            return self.grammars.admissible(spec, draft_tokens)
        except GrammarError:
            return 0  # the step without draft tokens will say it

    def _masks(
        self, specs: Sequence[Sequence[SampleSpec]]
    ) -> tuple[list[list[sampling.Mask | None]], dict[int, GrammarError]]:
        if self.grammars is None:
            return [[None] * len(wanted) for wanted in specs], {}
        found = self.grammars.masks(specs)
        self.mask_ns += self.grammars.mask_ns
        return found


def _draw(wanted: Sequence[tuple[int, SampleSpec]], logits_SV: torch.Tensor) -> list[int]:
    device = logits_SV.device
    params = [spec.params for _, spec in wanted]

    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    rows_SV = logits_SV.index_select(0, column([row for row, _ in wanted], torch.int64))
    temperatures_S = column([p.temperature for p in params], torch.float64)
    cuts_S = None
    filtered = [i for i, p in enumerate(params) if is_filtered(p)]
    if filtered:
        places, some = column(filtered, torch.int64), [params[i] for i in filtered]
        found = cuts(
            rows_SV.index_select(0, places),
            temperatures_S.index_select(0, places),
            column([p.top_k for p in some], torch.int32),
            column([p.top_p for p in some], torch.float64),
            column([p.min_p for p in some], torch.float64),
        )
        cuts_S = torch.full((len(params),), -math.inf, device=device).index_copy_(0, places, found)
    tokens: list[int] = draw(
        rows_SV,
        temperatures_S,
        column([signed(p.seed) for p in params], torch.int64),
        column([signed(spec.choice) for _, spec in wanted], torch.int64),
        column([len(spec.history) for _, spec in wanted], torch.int64),
        cuts_S,
    ).tolist()
    return tokens


def is_filtered(p: SamplingParams) -> bool:
    """Whether not all tokens may be drawn."""
    return bool(p.temperature) and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0)


def on_device(spec: SampleSpec) -> bool:
    """Whether the device draws it."""
    p = spec.params
    if len(spec.history) - spec.prompt_tokens < p.min_tokens:
        return False
    if unknown_fields(spec, ()):
        return False
    return p == SamplingParams(
        max_tokens=p.max_tokens,
        temperature=p.temperature,
        top_p=p.top_p,
        top_k=p.top_k,
        min_p=p.min_p,
        seed=p.seed,
        n=p.n,
        stop_token_ids=p.stop_token_ids,
        ignore_eos=p.ignore_eos,
        min_tokens=p.min_tokens,
        prompt_logprobs=p.prompt_logprobs,
    )


def unknown_fields(part: PlanRow | SampleSpec, known: Sequence[str]) -> list[str]:
    """Fields of a plan that are set, and that this runner has never heard of."""
    return [
        field.name
        for field in fields(part)
        if field.default is not MISSING
        and field.name not in known
        and getattr(part, field.name) != field.default
    ]
