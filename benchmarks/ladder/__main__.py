"""Cost of each step of a ladder of sizes: router, first token, memory.

    python -m benchmarks.ladder [--rounds 3] [--json FILE]

Prompts of 1,024 to 131,072 tokens, and bodies of real length (``bodies.py``), as chats. The fleet
is a router and two workers that serve a tiny model of real layers. Parts of the router's work are
timed in this process, with the router's own functions. ``over`` is TTFT minus the engine's time for
the prompt in ``/fleet/requests/ID``.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.config.fleet_file import DEFAULT_MODEL
from baton.model.artifact import resolve_model
from benchmarks.ladder.bodies import ANSWER_TOKENS, Body, bodies, prose
from benchmarks.ladder.fleet import LadderFleet, ladder_fleet
from benchmarks.ladder.phases import Phases, medians, phases_of
from benchmarks.ladder.tiny_model import write_tiny_model
from router.served_model import ServedModel

SIZES = (1024, 8192, 17_408, 33_792, 66_560, 131_072)
CONTEXT_TOKENS = 140_000
KV_BLOCKS = 40_000
MODES = ("colocated", "disaggregated")
_GROWTH_FROM = SIZES[1]
_GROWTH_TO = SIZES[-1]
_PARTS = ("body", "grammar", "template", "tokenizer", "hashes", "placement", "submission")
_MS = 1e3


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one request; times in ms.

    Attributes:
        first: TTFT at the client.
        over: TTFT minus the engine's time for the prompt.
        router_cpu: CPU time of the router's process, until the response was complete.
    """

    first: float
    over: float
    router_cpu: float
    answer_tokens: int


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of a step of the ladder; times in ms, memory in MiB."""

    name: str
    body_bytes: int
    phases: Phases
    seen: dict[str, Seen]  # by mode
    router_mib: float
    worker_mib: float


def prompts(model: ServedModel) -> Mapping[str, Body]:
    """Return chats whose prompts have these sizes."""
    text = prose(8 * SIZES[-1], 1)
    ids = model.tokenizer.encode(text)
    return {f"{size:,} tokens": _sized(model, ids, size) for size in SIZES}


def _sized(model: ServedModel, ids: list[int], size: int) -> Body:
    count = size
    while True:
        content = model.tokenizer.decode(ids[:count])
        messages = [{"role": "user", "content": content}]
        found = len(model.encode_chat(messages))
        if found <= size:
            return {"model": "default", "temperature": 0, "max_tokens": 4, "messages": messages}
        count -= found - size


def ask(fleet: LadderFleet, chat: Body, mode: str, salt: str) -> Seen:
    """Send an uncached chat and read its stream."""
    raw = json.dumps({**chat, "stream": True, "cache_salt": salt}).encode()
    headers = {"x-baton-mode": mode, "content-type": "application/json"}
    before_s = fleet.router_cpu_s()
    first_s = 0.0
    with httpx.Client(base_url=fleet.url, timeout=120, headers=headers) as client:
        began_s = time.monotonic()
        with client.stream("POST", "/v1/chat/completions", content=raw) as answer:
            if answer.status_code != httpx.codes.OK:
                raise RuntimeError(answer.read().decode()[:500])
            for line in answer.iter_lines():
                if line.startswith("data: {") and not first_s:
                    first_s = time.monotonic() - began_s
        cpu_s = fleet.router_cpu_s() - before_s
        report: dict[str, Any] = client.get(
            f"/fleet/requests/{answer.headers['x-request-id']}"
        ).json()
    if report["attempts"] != 1:
        raise RuntimeError(f"{report['attempts']} attempts instead of 1: {report['timeline']}")
    return Seen(
        first=_MS * first_s,
        over=_MS * (first_s - report["worker_times_s"]["prefill"]),
        router_cpu=_MS * cpu_s,
        answer_tokens=report["completion_tokens"],
    )


def measure(fleet: LadderFleet, model: ServedModel, name: str, chat: Body, rounds: int) -> Row:
    """Measure one step of the ladder."""
    raw = json.dumps(chat).encode()
    phases = medians(lambda: phases_of(raw, model), rounds)
    fleet.forget_peaks()
    times = 1 if chat["max_tokens"] == ANSWER_TOKENS else rounds
    seen = {}
    for mode in MODES:
        asked = [ask(fleet, chat, mode, f"{mode} {name} {turn}") for turn in range(times)]
        seen[mode] = _median(asked)
    peaks = fleet.peaks()
    return Row(
        name=name,
        body_bytes=len(raw),
        phases=phases,
        seen=seen,
        router_mib=peaks.router,
        worker_mib=max(peaks.prefill, peaks.decode),
    )


def _median(asked: list[Seen]) -> Seen:
    columns = [msgspec.structs.asdict(one) for one in asked]
    return msgspec.convert(
        {name: statistics.median_high(one[name] for one in columns) for name in columns[0]}, Seen
    )


def table(rows: list[Row]) -> Table:
    """Return the table of all steps."""
    shown = Table(title="times in ms, memory in MiB; c: colocated, d: disaggregated")
    shown.add_column("chat")
    for column in ("KB", "tokens", *_PARTS, "over c", "over d", "router", "worker"):
        shown.add_column(column, justify="right")
    shown.add_column("router CPU/token", justify="right")
    for row in rows:
        alone, handed = (row.seen[mode] for mode in MODES)
        parts = [getattr(row.phases, part) for part in _PARTS]
        shown.add_row(
            row.name,
            f"{row.body_bytes / 1000:.0f}",
            f"{row.phases.tokens:,}",
            *(f"{value:.1f}" for value in (*parts, alone.over, handed.over)),
            f"{row.router_mib:.0f}",
            f"{row.worker_mib:.0f}",
            f"{alone.router_cpu / alone.answer_tokens:.2f}" if alone.answer_tokens > 1000 else "",
        )
    return shown


def growth(rows: list[Row]) -> Table:
    """Return the ratio of a token's cost at the top to that further down; 1 is linear growth."""
    by_tokens = {row.name: row for row in rows}
    low, high = (by_tokens[f"{size:,} tokens"] for size in (_GROWTH_FROM, _GROWTH_TO))
    times = high.phases.tokens / low.phases.tokens
    shown = Table(title=f"cost of a token at {_GROWTH_TO:,} over that at {_GROWTH_FROM:,}")
    costs = {part: (getattr(low.phases, part), getattr(high.phases, part)) for part in _PARTS}
    for mode in MODES:
        costs[f"over, {mode}"] = (low.seen[mode].over, high.seen[mode].over)
    costs["router CPU"] = (low.seen[MODES[0]].router_cpu, high.seen[MODES[0]].router_cpu)
    for name in costs:
        shown.add_column(name, justify="right")
    cells = (f"{after / before / times:.2f}" if before else "" for before, after in costs.values())
    shown.add_row(*cells)
    return shown


async def run(rounds: int, folder: Path) -> list[Row]:
    """Run all steps, the smallest first; one of the largest warms the pools."""
    like = resolve_model(DEFAULT_MODEL)
    reference = write_tiny_model(folder / "model", like, CONTEXT_TOKENS)
    model = ServedModel(resolve_model(reference), ("default",), max_context_tokens=CONTEXT_TOKENS)
    model.speed_up()
    async with ladder_fleet(reference, folder, CONTEXT_TOKENS, KV_BLOCKS) as fleet:
        steps = {**prompts(model), **bodies()}
        for mode in MODES:
            ask(fleet, steps[f"{SIZES[-1]:,} tokens"], mode, f"warm {mode}")
        return [measure(fleet, model, name, chat, rounds) for name, chat in steps.items()]


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each step, for medians.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures here.")] = None,
) -> None:
    """Measure all steps and print their costs."""
    console = Console(width=max(Console().width, 170))
    with tempfile.TemporaryDirectory(prefix="bench-ladder-") as folder:
        rows = asyncio.run(run(rounds, Path(folder)))
    console.print(table(rows))
    console.print(growth(rows))
    if json_file is not None:
        record = {"python": sys.version.split()[0], "rows": msgspec.to_builtins(rows)}
        json_file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
