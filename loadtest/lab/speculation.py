"""Lab: n-gram speculation on and off, on texts that are more or less predictable."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

from baton.engine.core.speculative.proposers import NgramProposer, Speculation
from baton.engine.llm import LLM
from loadtest.commands.points import measured
from loadtest.lab.driver import engine
from loadtest.lab.results import Findings, Plot, Series
from loadtest.lab.table import LabContext

_PEOPLE = ("Ada", "Alan", "Charles", "Grace", "Mary", "John")
_ROWS = "".join(f'{{"name": "{n}", "born": {1800 + 9 * i}}}\n' for i, n in enumerate(_PEOPLE * 3))
_TALE = "Write a long story about a fox who learns to fly."
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "JSON lines, greedy": (_ROWS, {}),
    "a story, greedy": (_TALE, {}),
    "a story, temperature 1": (_TALE, {"temperature": 1.0, "seed": 3}),
    "JSON lines, 16 choices": (_ROWS, {"temperature": 0.7, "seed": 3, "n": 16}),
}
QUICK = ["JSON lines, greedy", "a story, temperature 1"]


@dataclass(frozen=True)
class Figure:
    """Medians in tokens/s for one case, and the draft tokens of the second engine."""

    case: str
    plain_tokens_per_s: float
    speculating_tokens_per_s: float
    ratio: float
    drafted: int
    accepted: int


def measure(case: str, plain: LLM, speculating: LLM, tokens: int, rounds: int) -> Figure:
    """Measure both engines in alternating rounds.

    Raises:
        RuntimeError: Their tokens differ.
    """
    prompt, fields = CASES[case]
    speculation = speculating.core.speculation
    if speculation is None:
        raise RuntimeError("the second engine does not speculate")
    before = speculation.draft_tokens, speculation.accepted_tokens
    rates: dict[str, list[float]] = {"plain": [], "speculating": []}
    for turn in range(rounds + 1):
        answers = []
        for name, llm in (("plain", plain), ("speculating", speculating)):
            began = time.perf_counter()
            params = {"temperature": 0.0, **fields}
            outputs = llm.generate([prompt], max_tokens=tokens, ignore_eos=True, **params)
            seconds = time.perf_counter() - began
            answers.append([output.token_ids for output in outputs])
            if turn:  # the first round warms up and caches the prompt's KV
                rates[name].append(sum(map(len, answers[-1])) / seconds)
        if answers[0] != answers[1]:
            raise RuntimeError(f"{case}: the tokens differ with speculation")
    slow = statistics.median(rates["plain"])
    fast = statistics.median(rates["speculating"])
    return Figure(
        case,
        slow,
        fast,
        fast / slow,
        speculation.draft_tokens - before[0],
        speculation.accepted_tokens - before[1],
    )


def run(context: LabContext) -> Findings:
    """Measure each text with and without speculation; the tokens must be equal."""
    plain = engine(context, kv_blocks=512)
    speculation = Speculation(NgramProposer())
    drafting = engine(context, kv_blocks=512, speculation=speculation)
    names = QUICK if context.quick else list(CASES)
    tokens, rounds = (64, 1) if context.quick else (128, 3)
    figures = measured(names, lambda name: measure(name, plain, drafting, tokens, rounds))
    saved = [figure.accepted / _output_tokens(figure, tokens, rounds) for figure in figures]
    most = saved.index(max(saved))
    least = saved.index(min(saved))
    return Findings(
        left_out=figures.left_out,
        parameters={"output tokens": tokens, "rounds": rounds, "numerics": "exact"},
        columns=["text", "off tok/s", "on tok/s", "on ÷ off", "drafted", "accepted %", "saved %"],
        rows=[
            [
                figure.case,
                figure.plain_tokens_per_s,
                figure.speculating_tokens_per_s,
                figure.ratio,
                figure.drafted,
                100 * figure.accepted / max(figure.drafted, 1),
                100 * share,
            ]
            for figure, share in zip(figures, saved, strict=True)
        ],
        plots=[
            Plot(
                title="Output rate",
                x_label="text",
                y_label="tokens/s",
                x=[float(index) for index in range(len(figures))],
                labels=[figure.case for figure in figures],
                series=[
                    Series("off", [figure.plain_tokens_per_s for figure in figures]),
                    Series("on", [figure.speculating_tokens_per_s for figure in figures]),
                ],
            )
        ],
        sentence=f"“{names[most]}” needed {100 * saved[most]:.0f} % fewer decode rows and was "
        f"{figures[most].ratio:.2f} × as fast; “{names[least]}” {100 * saved[least]:.0f} % and "
        f"{figures[least].ratio:.2f} ×; the tokens were the same.",
        notes=[
            "saved: share of decode rows that were not needed; unlike the times, it does not "
            "depend on other load on the machine.",
            f"Rounds: {rounds}, after a first one that warms up and caches the prompt. Medians.",
        ],
    )


def _output_tokens(figure: Figure, tokens: int, rounds: int) -> int:
    # includes the first round, whose draft tokens are counted too
    return tokens * (rounds + 1) * int(CASES[figure.case][1].get("n", 1))
