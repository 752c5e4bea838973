"""`baton top`: live view of the fleet in a terminal, with the figures of the live page.

It may be longer than the terminal: keys scroll it.
"""

import contextlib
import json
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from fleet.cli.common import FleetOption, emulated_note, get_json, running_fleet
from fleet.cli.explain import NewestOption, list_of
from fleet.local.state import FleetState

_COLOURS = {"ready": "green", "dead": "red", "parked": "dim"}
_BLOCKS = (("leased", "blue"), ("cached", "cyan"), ("quarantined", "red"), ("free", "bright_black"))
_BAR = 6
_SPARKS = "▁▂▃▄▅▆▇█"
_SHOWN_S = 40
_SHOWN_REQUESTS = 8
_LINES = {b"\x1b[A": -1, b"k": -1, b"\x1b[B": 1, b"j": 1}
_PAGES = {b"\x1b[5~": -1, b"b": -1, b"\x1b[6~": 1, b" ": 1}
_ENDS = {b"\x1b[H": 0, b"g": 0, b"\x1b[F": sys.maxsize, b"G": sys.maxsize}
_QUIT = (b"q", b"\x03")


def top(
    fleet: FleetOption = None,
    every_s: Annotated[
        float, typer.Option("--every", help="Seconds between updates.", min=0.2, max=60)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
    newest: NewestOption = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures of one frame as JSON and exit.")
    ] = False,
) -> None:
    """Watch workers, KV blocks, hand-offs, latency and the slowest requests. q or Ctrl-C exits.

    Arrow and page keys scroll, g and G lead to the first and last line. Workers that are not ready
    come first.

    Columns: prefill/s is prompt tokens computed per second, step the duration of a decode step,
    moved the hand-offs of the last ten seconds.
    """
    state = running_fleet(fleet)
    console = Console()
    order = "newest" if newest else "slowest"
    if as_json:
        names = ("fleet", "series", "requests")
        typer.echo(json.dumps(dict(zip(names, _figures(state, order), strict=True)), indent=2))
        return
    if once:
        console.print(_now(state, order))
        return
    view = Scrolled()
    view.content = _now(state, order)
    with (
        contextlib.suppress(KeyboardInterrupt),
        keys() as terminal,
        Live(view, console=console, screen=True, auto_refresh=False) as live,
    ):
        drawn_s = time.monotonic()
        live.refresh()
        while True:
            key = next_key(terminal, drawn_s + every_s - time.monotonic())
            if key and not view.press(key):
                return
            if time.monotonic() >= drawn_s + every_s:
                view.content = _now(state, order)
                drawn_s = time.monotonic()
            live.refresh()


def _figures(state: FleetState, order: str) -> tuple[Any, Any, Any]:
    requests = get_json(state, "/fleet/requests", limit=_SHOWN_REQUESTS, order=order)
    return get_json(state, "/fleet"), get_json(state, "/fleet/series"), requests["requests"]


def _now(state: FleetState, order: str) -> RenderableType:
    return frame(state.name, *_figures(state, order), order)


def frame(
    name: str,
    fleet: dict[str, Any],
    series: dict[str, Any],
    requests: list[dict[str, Any]],
    order: str = "slowest",
) -> RenderableType:
    """Return one frame, from the responses of /fleet, /fleet/series and /fleet/requests."""
    moved = fleet["transfers"]
    handed = f"{moved['count']}, {moved['bytes'] / 2**20:.1f} MiB, {moved['failures']} failed"
    head = Text.assemble((name, "bold"), f"  hand-offs: {handed}")
    if timing := fleet.get("emulated"):  # absent in older routers' responses
        head.append(f"\n{emulated_note(timing)}", style="bold yellow")
    return Group(
        head,
        Text(),
        _workers(fleet["workers"], series["workers"], series["samples"][-10:]),
        Text(),
        _latency(series["samples"][-_SHOWN_S:]),
        Text(),
        Text(f"{order} requests", style="bold"),
        list_of(requests),
    )


def _workers(
    workers: list[dict[str, Any]], rates: dict[str, Any], samples: list[dict[str, Any]]
) -> Table:
    headers = ("worker", "role", "state", "KV leased+cached/all", "run", "wait")
    table = Table(*headers, "prefill/s", "step", "moved", box=None, padding=(0, 1, 0, 0))
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.no_wrap = True
    for worker in sorted(workers, key=_not_ready_first):
        rate = rates.get(worker["id"], {})
        prefill = rate.get("prefill_tokens_per_s")
        step_s = rate.get("decode_step_s")
        handed = sum(
            count
            for sample in samples
            for edge, count in sample["handoffs"].items()
            if worker["id"] in edge.split(">")
        )
        table.add_row(
            escape(worker["id"]),
            escape(worker["role"]),
            Text(worker["state"], style=_COLOURS.get(worker["state"], "yellow")),
            _block_bar(worker["kv_blocks"]),
            str(worker["running"]),
            str(worker["waiting"]),
            f"{prefill:.0f}" if prefill else "-",
            f"{step_s * 1000:.1f} ms" if step_s else "-",
            str(handed),
        )
    return table


def _not_ready_first(worker: dict[str, Any]) -> tuple[bool, list[str | int]]:
    """Sort by state, then by name, with prefill-2 before prefill-10."""
    parts = re.split(r"(\d+)", worker["id"])
    return worker["state"] == "ready", [int(part) if part.isdigit() else part for part in parts]


def _block_bar(blocks: dict[str, int]) -> Text:
    """Return a bar of leased, cached, quarantined and free blocks, one cell at least for each."""
    bar = Text()
    total = max(blocks["total"], 1)
    for state, colour in _BLOCKS[:-1]:
        cells = blocks[state] * _BAR / total
        bar.append("█" * (max(round(cells), 1) if blocks[state] else 0), style=colour)
    bar.truncate(_BAR)
    bar.append("░" * (_BAR - len(bar)), style=_BLOCKS[-1][1])
    bar.append(f" {blocks['leased']}+{blocks['cached']}/{blocks['total']}")
    return bar


def _latency(samples: list[dict[str, Any]]) -> Table:
    table = Table("", f"last {_SHOWN_S} s", "now", "worst", box=None)
    rows = {
        "TTFT p99": [sample["ttft_p99_s"] for sample in samples],
        "ITL p99": [sample["itl_p99_s"] for sample in samples],
    }
    for name, values in rows.items():
        known = [value for value in values if value is not None]
        now = next((value for value in reversed(values) if value is not None), None)
        table.add_row(name, _sparks(values), _ms(now), _ms(max(known, default=None)))
    rates = [sample["generated_tokens"] / sample["took_s"] for sample in samples]
    now, best = (rates[-1], max(rates)) if rates else (0.0, 0.0)
    table.add_row("tokens/s", _sparks(rates), f"{now:.0f}", f"{best:.0f} (best)")
    queued = [float(sample["queued"]) for sample in samples]
    now, most = (queued[-1], max(queued)) if queued else (0.0, 0.0)
    table.add_row("queued", _sparks(queued), f"{now:.0f}", f"{most:.0f}")
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"


def _sparks(values: list[float] | list[float | None]) -> str:
    top = max((value for value in values if value is not None), default=0.0) or 1.0
    return "".join(
        " " if value is None else _SPARKS[min(int(value / top * len(_SPARKS)), len(_SPARKS) - 1)]
        for value in values
    )


class Scrolled:
    """Part of a content that fits into the terminal. ``first`` is its first line."""

    def __init__(self) -> None:
        self.content: RenderableType = ""
        self.first = 0
        self._height = 1
        self._lines = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines from ``first`` on, and a last line if there are more."""
        lines = console.render_lines(self.content, options.update(height=None), pad=False)
        self._height = max(options.size.height - 1, 1)
        self._lines = len(lines)
        self.first = max(min(self.first, self._lines - self._height), 0)
        shown = lines[self.first : self.first + self._height]
        for line in shown:
            yield from line
            yield Segment.line()
        if len(shown) < self._lines:
            last = self.first + len(shown)
            yield Segment(
                f"lines {self.first + 1} to {last} of {self._lines}: arrows, page keys, g, G, q"
            )

    def press(self, key: bytes) -> bool:
        """Scroll by a key; return False if it ends the view."""
        if key in _LINES:
            self.first += _LINES[key]
        elif key in _PAGES:
            self.first += _PAGES[key] * self._height
        elif key in _ENDS:
            self.first = _ENDS[key]
        self.first = max(min(self.first, self._lines - self._height), 0)
        return key not in _QUIT


@contextlib.contextmanager
def keys() -> Iterator[int | None]:
    """Yield the descriptor of a terminal that gives each key at once; None without a terminal."""
    if not sys.stdin.isatty():
        yield None
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield terminal
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def next_key(terminal: int | None, wait_s: float) -> bytes:
    """Return the next key, or nothing after ``wait_s`` seconds."""
    if terminal is None:
        time.sleep(wait_s)
        return b""
    readable, _, _ = select.select([terminal], [], [], max(wait_s, 0.0))
    return os.read(terminal, 16) if readable else b""
