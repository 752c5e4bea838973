"""Cost of 200 tools: the router's work for the first and for later requests, and decode steps.

    python -m benchmarks.tools

The step is that of the default model with one sequence and a short prompt, where the mask of the
grammar weighs most. Both kinds of steps run in turns in one process.
"""

import json
import statistics
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from baton.config.fleet_file import DEFAULT_MODEL
from baton.engine.llm import LLM
from baton.model.artifact import resolve_model
from baton.text.grammar import GrammarCompiler, translate
from baton.types.params import SamplingParams
from benchmarks.ladder.bodies import TOOLS_BYTES, conversation, tools_of
from benchmarks.ladder.phases import phases_of
from loadtest.percent import percent
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.parse import parse
from router.frontend.api.structured_output import requested_grammar
from router.served_model import ServedModel

_CONTEXT_TOKENS = 131_072
_ANSWER_TOKENS = 96
_PARTS = ("body", "grammar", "template", "tokenizer")
_GOAL_MS = 20.0
_GOAL_SHARE = 0.05


def main(
    tools: Annotated[int, typer.Option(min=1, max=512, help="Number of tools.")] = 200,
    tools_bytes: Annotated[int, typer.Option(help="Their JSON in bytes.")] = TOOLS_BYTES,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of steps, for medians.")] = 7,
) -> None:
    """Measure and print the costs."""
    chat = {"model": "default", "messages": conversation(1), "tools": tools_of(tools, tools_bytes)}
    raw = json.dumps(chat).encode()
    model = ServedModel(
        resolve_model(DEFAULT_MODEL),
        ("default",),
        max_context_tokens=_CONTEXT_TOKENS,
        emulated=True,
    )
    model.speed_up()
    shown = Table(title=f"{tools} tools, {len(raw):,} bytes: ms of the router")
    for column in ("request", *_PARTS, "sum", f"goal {_GOAL_MS:g}"):
        shown.add_column(column, justify="right")
    for name in ("first", "second", "third"):
        phases = phases_of(raw, model)
        parts = [getattr(phases, part) for part in _PARTS]
        total = sum(parts)
        cells = [f"{value:.1f}" for value in (*parts, total)]
        shown.add_row(name, *cells, "met" if total <= _GOAL_MS else "missed")
    console = Console()
    console.print(shown)

    requested = requested_grammar(parse(ChatBody, raw), model)
    if requested is None:
        raise typer.Exit(1)
    grammar = translate(requested.kind, requested.source)
    compiler = GrammarCompiler(model.vocabulary())
    began_s = time.perf_counter()
    compiler.compile(grammar)
    console.print(f"compilation, once per list of tools: {time.perf_counter() - began_s:.3f} s")

    llm = LLM()
    free_s: list[float] = []
    bound_s: list[float] = []
    for _ in range(rounds + 1):
        free_s.append(_step_s(llm, ""))
        bound_s.append(_step_s(llm, grammar))
    free = statistics.median(free_s[1:])  # the first round warms up
    bound = statistics.median(bound_s[1:])
    share = bound / free - 1
    verdict = "met" if share <= _GOAL_SHARE else "missed"
    console.print(
        f"step: {free * 1e3:.2f} ms free, {bound * 1e3:.2f} ms with the grammar: "
        f"{100 * share:+.1f} % (goal {percent(_GOAL_SHARE, 0)}: {verdict})"
    )


def _step_s(llm: LLM, grammar: str) -> float:
    """Return the time of a decode step."""
    sampling = SamplingParams(
        max_tokens=_ANSWER_TOKENS, temperature=0.0, ignore_eos=True, grammar=grammar
    )
    began_s = time.perf_counter()
    [output] = llm.generate(["Write a long story about a river."], sampling)
    return (time.perf_counter() - began_s) / max(len(output.tokens), 1)


if __name__ == "__main__":
    typer.run(main)
