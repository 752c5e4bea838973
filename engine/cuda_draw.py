"""Which token each row of a step draws: plain draws on the device, all others on the host.

A draw is plain when the largest logit, or the largest logit / temperature + noise, is the answer. A
draw with filters, penalties, log-probabilities or a grammar has its row of logits brought to the
host, where ``engine/sampling.py`` draws. Which of the two it is depends on the draw alone, never on
what else is in the step.
"""

# ruff: noqa: N803, N806 - suffixes such as x_TE give shapes

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields

import torch

from engine import sampling, verifying
from engine.core.errors import GrammarError
from engine.core.params import SampledToken, SamplingParams
from engine.core.plan import PlanRow, SampleSpec
from engine.cuda_steps import signed
from engine.grammars import Grammars
from engine.kernels.rows import draw

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
        """See ``engine.sampling.sample``."""
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
        self.mask_ns = 0  # of the last step
        self._eos_token_ids = eos_token_ids

    def start(
        self, draws: Mapping[int, Specs], logits_SV: torch.Tensor
    ) -> tuple[dict[int, list[int]], dict[int, torch.Tensor]]:
        """Draw on the device what is plain, and fetch the logits of the rest; waits for both.

        Args:
            draws: What rows draw, by the row's number.
            logits_SV: The logits of these rows, in this order; finite.
        """
        plain: list[tuple[int, int, SampleSpec]] = []
        fetched: list[tuple[int, int]] = []
        for place, (number, specs) in enumerate(draws.items()):
            if all(on_device(spec) for spec in specs):
                plain += [(place, number, spec) for spec in specs]
            else:
                fetched.append((place, number))
        drawn: dict[int, list[int]] = {}
        if plain:
            tokens = _draw_plain([(place, spec) for place, _, spec in plain], logits_SV)
            for (_, number, _), token in zip(plain, tokens, strict=True):
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
        self.mask_ns = 0
        every = Drawable(range(len(drawn) + len(host)), drawn, host)
        return verifying.draw_by(Drawable.sample, every, rows, self._eos_token_ids, self._masks)

    def admissible(self, spec: SampleSpec, guesses: Sequence[int]) -> int:
        """See ``engine.core.plan.ModelRunner``."""
        if self.grammars is None or not spec.params.grammar:
            return len(guesses)
        try:
            return self.grammars.admissible(spec, guesses)
        except GrammarError:
            return 0  # the step without guesses will say it

    def _masks(
        self, specs: Sequence[Sequence[SampleSpec]]
    ) -> tuple[list[list[sampling.Mask | None]], dict[int, GrammarError]]:
        if self.grammars is None:
            return [[None] * len(wanted) for wanted in specs], {}
        found = self.grammars.masks(specs)
        self.mask_ns += self.grammars.mask_ns
        return found


def _draw_plain(wanted: Sequence[tuple[int, SampleSpec]], logits_SV: torch.Tensor) -> list[int]:
    device = logits_SV.device
    rows = torch.tensor([row for row, _ in wanted], device=device)
    specs = [spec for _, spec in wanted]
    seeds = [signed(spec.params.seed) for spec in specs]
    tokens: list[int] = draw(
        logits_SV.index_select(0, rows),
        torch.tensor([s.params.temperature for s in specs], dtype=torch.float64, device=device),
        torch.tensor(seeds, device=device),
        torch.tensor([signed(spec.choice) for spec in specs], device=device),
        torch.tensor([len(spec.history) for spec in specs], device=device),
    ).tolist()
    return tokens


def on_device(spec: SampleSpec) -> bool:
    """Whether the largest logit, or logit / temperature + noise, is the answer."""
    p = spec.params
    if len(spec.history) - spec.prompt_tokens < p.min_tokens:
        return False
    if unknown_fields(spec, ()):
        return False
    return p == SamplingParams(
        max_tokens=p.max_tokens,
        temperature=p.temperature,
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
