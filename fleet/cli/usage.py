"""Usage and cost of tenants: `baton usage`."""

import csv
import json
import os
import sys
import time
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from fleet.cli.common import JsonOption, fail
from fleet.cli.reach import HERE, FleetAddress, ask_router
from loadtest.commands.option_groups import with_options

_DAY_S = 24 * 3600
_WIDEST = 400  # columns of a table
_WIDEST_NAME = 24
_NAMES = ("hour", "tenant", "key", "model")
_COUNTS = ("requests", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
_COSTS = (
    "worker_s",
    "cost",
    "cost_per_1000_input",
    "cost_per_1000_computed",
    "cost_per_1000_output",
)
_TITLES = ("requests", "refused", "input", "cached", "output", "worker\ns")
_PRICE_TITLES = ("cost", "per 1000\ninput", "per 1000\noutput")  # if workers have a price


@with_options()
def usage(
    begin: Annotated[
        str, typer.Option("--from", help="First day or hour (UTC), such as 2026-01-31T08.")
    ] = "",
    end: Annotated[
        str, typer.Option("--to", help="End, as for --from: not included. Default: now.")
    ] = "",
    by: Annotated[str, typer.Option(help="Names of a line: hour, tenant, key, model.")] = "tenant",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: JsonOption = False,
    at: FleetAddress = HERE,
) -> None:
    """Show requests, tokens, worker seconds and costs of tenants. Default: the last 24 hours.

    The line `(idle)` has the time of workers that no request was charged.
    """
    # The current second counts: it may be the first one of an hour.
    end_s = _seconds(end, "--to") if end else int(time.time()) + 1
    begin_s = _seconds(begin, "--from") if begin else end_s - _DAY_S
    if begin_s >= end_s:
        fail("--from must be before --to")
    names_asked = quote(os.fsencode(by.replace(" ", "")))
    path = f"/fleet/usage?start_time={begin_s}&end_time={end_s}&by={names_asked}"
    used = ask_router(at.reach(), "GET", path)
    names = [name for name in _NAMES if name in by.split(",")]
    if as_json:
        typer.echo(json.dumps(used, indent=2))
    elif as_csv:
        _print_csv(used["lines"], names)
    else:
        _print_table(used["lines"], names or ["tenant"])


def _seconds(given: str, option: str) -> int:
    """Return a day or an hour in Unix seconds."""
    form = "%Y-%m-%dT%H" if "T" in given else "%Y-%m-%d"
    try:
        return int(datetime.strptime(given, form).replace(tzinfo=UTC).timestamp())
    except ValueError:
        fail(
            f"{option} {given!r}: must be a day such as 2026-01-31, or an hour such as "
            "2026-01-31T08"
        )


def _hour(line: dict[str, Any]) -> str:
    return datetime.fromtimestamp(line["hour"], UTC).strftime("%Y-%m-%dT%H:00Z")


def _print_csv(lines: list[dict[str, Any]], names: list[str]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([*_NAMES, *_COUNTS, "refusals", *_COSTS])
    for line in lines:
        hour = _hour(line) if "hour" in names else ""
        refusals = json.dumps(line["refusals"]) if line["refusals"] else ""
        figures = [line[name] for name in _COUNTS]
        costs = [line[name] for name in _COSTS]
        writer.writerow([hour, *(line[name] for name in _NAMES[1:]), *figures, refusals, *costs])


def _print_table(lines: list[dict[str, Any]], names: list[str]) -> None:
    priced = any(line["cost"] for line in lines)
    titles = (*_TITLES, *_PRICE_TITLES * priced)
    columns = [Column(name, overflow="fold", max_width=_WIDEST_NAME) for name in names]
    columns += [Column(name, justify="right", no_wrap=True) for name in titles]
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for line in lines:
        texts = [_hour(line) if name == "hour" else escape(line[name] or "–") for name in names]
        counts = (line["requests"], sum(line["refusals"].values()))
        tokens = (line["input_tokens"], line["cached_tokens"], line["output_tokens"])
        prices = [
            f"{line['cost']:,.4f}",
            _price(line["cost_per_1000_input"]),
            _price(line["cost_per_1000_output"]),
        ]
        figures = [*(f"{count:,}" for count in (*counts, *tokens)), f"{line['worker_s']:,.1f}"]
        table.add_row(*texts, *figures, *prices * priced)
    console = Console()
    whole = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    Console(width=max(whole, console.width)).print(table)  # never cuts a figure


def _price(cost: float | None) -> str:
    return "–" if cost is None else f"{cost:.3g}"
