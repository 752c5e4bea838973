"""N-gram speculation on and off, on texts that differ in how well they can be guessed."""

from baton.engine.core.speculative.proposers import NgramProposer, Speculation
from baton.engine.llm import LLM
from loadtest.lab.results import Findings, Plot, Series
from loadtest.lab.speculation import CASES, Figure, measure
from loadtest.lab.table import LabContext

QUICK = ["JSON lines, greedy", "a story, temperature 1"]


def run(context: LabContext) -> Findings:
    """Each text with and without, in turns; the tokens must be equal."""
    plain = LLM(context.model, threads=context.threads, kv_blocks=512)
    speculation = Speculation(NgramProposer())
    guessing = LLM(context.model, threads=context.threads, kv_blocks=512, speculation=speculation)
    names = QUICK if context.quick else list(CASES)
    tokens, rounds = (64, 1) if context.quick else (128, 3)
    figures = [measure(name, plain, guessing, tokens, rounds) for name in names]
    saved = [figure.accepted / _written(figure, tokens, rounds) for figure in figures]
    most, least = saved.index(max(saved)), saved.index(min(saved))
    return Findings(
        parameters={"answer tokens": tokens, "rounds": rounds, "numerics": "exact"},
        columns=["text", "off tok/s", "on tok/s", "on ÷ off", "guesses", "right %", "saved %"],
        rows=[
            [
                figure.case,
                figure.plain_tokens_per_s,
                figure.speculating_tokens_per_s,
                figure.ratio,
                figure.guesses,
                100 * _right(figure),
                100 * share,
            ]
            for figure, share in zip(figures, saved, strict=True)
        ],
        plots=[
            Plot(
                title="Tokens written a second",
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
            "saved: rows of decode steps that were not needed, of all; a busy machine does not "
            "change them by its noise as it does the times.",
            f"Medians of {rounds} rounds, after one to warm up that also leaves the prompt's KV.",
        ],
    )


def _right(figure: Figure) -> float:
    return figure.accepted / max(figure.guesses, 1)


def _written(figure: Figure, tokens: int, rounds: int) -> int:
    """Tokens of all answers, those of the first round too."""
    return tokens * (rounds + 1) * int(CASES[figure.case][1].get("n", 1))
