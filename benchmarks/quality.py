"""Loss of accuracy by quantisation, beside its savings in memory and time.

    python -m benchmarks.quality [--model REF] [--threads 1] [--no-times] [--json FILE]

The same model with its weights and its KV cache in fewer bits, on fixed inputs:

- perplexity of the opening of *Alice's Adventures in Wonderland* (Lewis Carroll, 1865, public
  domain; ``text/alice.txt``), and how often the likeliest next token is the same as without;
- a long context: log-likelihood (nats) of a number that precedes three copies of that text and is
  requested after them;
- structured output: responses under a JSON schema, how many end, and equal those without;
- free greedy responses: how many tokens they have in common with those without;
- the median time of a decode step and of a prompt, after one to warm up.
"""

import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from baton.engine.llm import DEFAULT_MODEL, LLM
from baton.engine.loading.memory import EngineShape, footprint
from baton.text.grammar import translate
from baton.types.params import SamplingParams

TEXT = Path(__file__).parent / "text" / "alice.txt"
VARIANTS = (
    ("none", "none"),
    ("none", "int8"),
    ("none", "fp8"),
    ("int8", "none"),
    ("int4", "none"),
    ("int8", "int8"),
    ("int4", "int8"),
    ("int4", "fp8"),
)
SECRET = "The number of the house is 7 4 1 9 3."
COPIES = 3
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "city": {"type": "string", "maxLength": 24},
    },
    "required": ["name", "age", "city"],
}
PEOPLE = (
    "a baker from Lyon",
    "a sailor from Lisbon",
    "a young teacher from Oslo",
    "an old judge from Vienna",
    "a nurse from Dublin",
    "a student from Athens",
    "a farmer from Seville",
    "a painter from Prague",
)
OPENINGS = (
    "Once upon a time",
    "The capital of France",
    "Water boils at",
    "A good friend is",
    "In the year 1905",
    "The recipe needs",
    "def fibonacci(n):",
    "The sun is",
    "To learn a language",
    "My favourite book",
    "The train to Berlin",
    "Music helps",
)
ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Quality:
    """A row of the table."""

    weights: str
    kv: str
    weights_mib: float
    kv_bytes_per_token: int
    perplexity: float
    same_best: float  # share of positions
    secret_nats: float  # log-likelihood; 0 is certain
    json_ended: int
    json_same: int
    greedy_same: float  # share of tokens before the first that differs
    decode_1_ms: float | None
    decode_16_ms: float | None
    decode_8_long_ms: float | None  # after 1,024 tokens each
    prefill_512_ms: float | None


@dataclass(frozen=True)
class _Answers:
    best: list[int]
    people: list[str]
    openings: list[list[int]]


@contextmanager
def _stopwatch(seconds: list[float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - began)


class Examination:
    """Measures variants one after another, and compares them with the first."""

    def __init__(self, model: str, threads: int, *, times: bool = True) -> None:
        self._model = model
        self._threads = threads
        self._times = times
        self._plain: _Answers | None = None

    def examine(self, weights: str, kv: str) -> Quality:
        """Return all figures of one variant."""
        llm = LLM(self._model, weights=weights, kv=kv, kv_blocks=640, threads=self._threads)
        text = llm.tokenizer.encode(TEXT.read_text())
        logprobs, best = _scores(llm, text)
        people, ended = _people(llm)
        answers = _Answers(best, people, _openings(llm))
        plain = self._plain = self._plain or answers
        geometry = llm.runner.geometry
        return Quality(
            weights,
            kv,
            footprint(EngineShape(llm.artifact.config, quantisation=weights)).weights / 2**20,
            geometry.block_bytes // geometry.block_tokens,
            math.exp(-sum(logprobs) / len(logprobs)),
            _share(answers.best, plain.best),
            _secret(llm, text),
            ended,
            sum(a == b for a, b in zip(answers.people, plain.people, strict=True)),
            _common(answers.openings, plain.openings),
            *(self._durations_ms(llm) if self._times else [None] * 4),
        )

    @staticmethod
    def _durations_ms(llm: LLM) -> list[float]:
        long = _decode_s(llm, 8, context=1024)
        return [1e3 * s for s in (_decode_s(llm, 1), _decode_s(llm, 16), long, _prefill_s(llm))]


def _scores(llm: LLM, tokens: Sequence[int]) -> tuple[list[float], list[int]]:
    """Return the log-probability of each token but the first, and the likeliest token there."""
    [output] = llm.generate([list(tokens)], max_tokens=1, prompt_logprobs=1)
    scores = output.scores
    if scores is None:
        raise RuntimeError("the engine returned no scores")
    best: list[int] = np.frombuffer(scores.top_ids, "<u4").tolist()
    logprobs: list[float] = np.frombuffer(scores.logprobs, "<f4").tolist()
    return logprobs, best


def _secret(llm: LLM, text: Sequence[int]) -> float:
    encode = llm.tokenizer.encode
    head = encode(f"{SECRET}\n\n")
    question = encode("\n\nThe number of the house is")
    number = encode(" 7 4 1 9 3")
    prompt = [*head, *(list(text) * COPIES), *question, *number]
    logprobs, _ = _scores(llm, prompt)
    return sum(logprobs[-len(number) :])


def _people(llm: LLM) -> tuple[list[str], int]:
    """Return objects under a schema, and how many were complete before the limit."""
    grammar = translate("json", json.dumps(SCHEMA))
    answers = []
    ended = 0
    for person in PEOPLE:
        question = f"Invent {person}. Answer with a JSON object with name, age and city."
        messages = [{"role": "user", "content": question}]
        output = llm.chat(messages, grammar=grammar, max_tokens=64, temperature=0.0)
        answers.append(output.text)
        if output.finish_reason == "stop":
            ended += set(json.loads(output.text)) == set(SCHEMA["required"])
    return answers, ended


def _openings(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)
    return [output.token_ids for output in llm.generate(list(OPENINGS), params)]


def _share(left: Sequence[int], right: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(left, right, strict=True)) / len(right)


def _common(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens before the first that differs, over all responses."""
    same = 0
    for ours, theirs in zip(left, right, strict=True):
        pairs = zip(ours, theirs, strict=True)
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), len(theirs))
    return same / sum(map(len, right))


def _decode_s(llm: LLM, batch: int, context: int = 128, steps: int = 12) -> float:
    prompts = [[(97 * i + 31 * j) % 40_000 + 100 for j in range(context)] for i in range(batch)]
    times: list[float] = []
    runner = llm.core.runner
    real = runner.execute

    def timed(plan, on_layers_done=None):  # type: ignore[no-untyped-def]
        taken = times if all(len(row.tokens) == 1 for row in plan.rows) else []
        with _stopwatch(taken):
            return real(plan, on_layers_done)

    runner.execute = timed  # type: ignore[method-assign]
    try:
        llm.generate(prompts, max_tokens=steps, temperature=0.0, ignore_eos=True)
    finally:
        runner.execute = real  # type: ignore[method-assign]
    return statistics.median(times)


def _prefill_s(llm: LLM, tokens: int = 512, rounds: int = 4) -> float:
    """Return the median time of an uncached prompt; the first one warms up."""
    times: list[float] = []
    for turn in range(rounds):
        prompt = [(389 * j + 7919 * turn) % 40_000 + 100 for j in range(tokens)]
        with _stopwatch(times):
            llm.generate([prompt], max_tokens=1, temperature=0.0)
    return statistics.median(times[1:])


def main(
    model: Annotated[str, typer.Option(help="Model reference.")] = DEFAULT_MODEL,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    times: Annotated[bool, typer.Option(help="Measure times too, on an idle machine.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures here.")] = None,
) -> None:
    """Measure perplexity, long context, structured output, memory and speed of quantisations."""
    examination = Examination(model, threads, times=times)
    console = Console()
    rows = []
    for weights, kv in VARIANTS:
        rows.append(examination.examine(weights, kv))
        console.print(f"{weights} weights, {kv} KV: perplexity {rows[-1].perplexity:.3f}")
    table = Table(title=f"quantisation; bf16 activations, exact, {threads} threads")
    table.add_column("")
    for row in rows:
        table.add_column(f"{row.weights}\n{row.kv}", justify="right")
    for name in asdict(rows[0]):
        values = [getattr(row, name) for row in rows]
        if values[0] is None:
            continue
        shown = (f"{v:.3f}" if isinstance(v, float) else str(v) for v in values)
        table.add_row(name.replace("_", " "), *shown)
    console.print(table)
    if json_file is not None:
        record = {"model": model, "threads": threads, "torch": torch.__version__}
        text = json.dumps({**record, "rows": [asdict(row) for row in rows]}, indent=1)
        json_file.write_text(text + "\n")


if __name__ == "__main__":
    typer.run(main)
