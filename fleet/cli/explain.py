"""`baton explain`: the placement of a request, and where its time went."""

import json
import os
import time
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fleet.cli.common import FleetOption, get_json, running_fleet
from router.routing.placement.cost import Terms

_BAR = 30
_SHOWN_CANDIDATES = 8

NewestOption = Annotated[
    bool, typer.Option("--newest", help="List the latest requests, not the slowest.")
]


def explain(
    request_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[REQUEST_ID]",
            help="`x-request-id` of the response. Default: list the slowest requests.",
        ),
    ] = None,
    fleet: FleetOption = None,
    newest: NewestOption = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=500, help="Number of listed requests.")
    ] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print the router's response.")] = False,
) -> None:
    """Explain why a request was slow: its phases, its placement and the cost of each candidate."""
    state = running_fleet(fleet)
    console = Console()
    if request_id is None:
        order = "newest" if newest else "slowest"
        answer = get_json(state, "/fleet/requests", limit=limit, order=order)
        shown: RenderableType = list_of(answer["requests"])
    else:
        answer = get_json(state, f"/fleet/requests/{quote(os.fsencode(request_id), safe='')}")
        shown = Group(*(report_of(part) for part in answer.get("parts", [answer])))
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        console.print(shown)
        if request_id is not None:
            console.print(f"page: {state.url}/#request={request_id}", soft_wrap=True, markup=False)


def list_of(requests: list[dict[str, Any]]) -> RenderableType:
    """Return the list of requests with one sentence each."""
    if not requests:
        return Text("no request yet")
    table = Table("time", "took", "first token", "tokens", "request", box=None, padding=(0, 1))
    for column in table.columns[:4]:
        column.no_wrap = True
    table.columns[4].overflow = "fold"  # so that the id is whole
    now_s = time.time()
    for request in requests:
        first_s = request["first_token_s"]
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(now_s - request["age_s"])),
            _s(request["elapsed_s"]),
            _s(first_s) if first_s is not None else "-",
            f"{request['prompt_tokens']} → {request['completion_tokens']}",
            Text.assemble(
                (request["id"], "bold"),
                f"  {request['tenant']}, {_route(request)}\n{request['sentence']}",
            ),
        )
    return table


def _route(request: dict[str, Any]) -> str:
    if request["decode"] is None:
        return "waits" if request["state"] == "queued" else "-"
    if request["prefill"] == request["decode"]:
        return str(request["decode"])
    return f"{request['prefill']} → {request['decode']}"


def report_of(report: dict[str, Any]) -> RenderableType:
    """Return the report of one request."""
    route = report["route"] or {}
    head = Text.assemble((report["id"], "bold"), f"  {report['state']}, tenant {report['tenant']}")
    why = Text(report["why"]["sentence"], style="bold yellow")
    where = "was not placed"
    if route:
        where = f"{route['mode']}: {route['prefill']} → {route['decode']}"
        where += f", {route['cached_tokens']} of {report['prompt_tokens']} prompt tokens cached"
    if report["regret_s"] is not None:
        where += f", regret {_s(report['regret_s'])}"
        if better := report["better"]:
            where += f" (better: {better['prefill'] or better['decode']} → {better['decode']})"
    if sources := report.get("prefix_from"):
        named = (f"{source['worker_id']} (until block {source['blocks']})" for source in sources)
        where += "\nprompt prefix pulled from " + ", then ".join(named)
    parts: list[RenderableType] = [head, why, Text(where)]
    if hints := report.get("hints"):
        parts += [Text(_hints(hints))]
    if change := report.get("prompt_change"):
        parts += [Text(change["sentence"], style="bold yellow")]
        parts += [
            Text(f"{name}: {change[name]!r}") for name in ("earlier", "now") if name in change
        ]
    parts += [Text(), _phases(report)]
    if report["longest_gaps"]:
        gaps = "; ".join(
            f"{_s(gap['gap_s'])} before token {gap['before_token']}"
            for gap in report["longest_gaps"]
        )
        parts += [Text(f"longest gaps: {gaps} (usually {_s(report['usual_gap_s'])})")]
    if (times := report["worker_times_s"]) and (times["preemptions"] or times["repaired_chunks"]):
        repaired = f"{times['repaired_chunks']} KV chunks pulled again"
        parts.append(Text(f"{times['preemptions']} preemptions, {repaired}"))
    parts += [Text(), _candidates(report), Text(), _timeline(report)]
    return Group(*parts)


def _hints(hints: dict[str, int]) -> str:
    texts = []
    keep_s = hints.get("keep_s")
    if keep_s is not None:
        stays = "stays" if hints.get("kept", True) else "cannot be kept"
        texts.append(f"its KV {stays} {keep_s} s" if keep_s else "its session has ended")
    if turn := hints.get("turn"):
        texts.append(f"it waits {'behind' if turn > 0 else 'before'} others of the tenant")
    return f"hints of the client: {', '.join(texts)}"


def _phases(report: dict[str, Any]) -> Table:
    table = Table("phase", "took", "", box=None, padding=(0, 1))
    total_s = report["elapsed_s"] or 1.0
    for name, took_s in report["phases_s"].items():
        table.add_row(name, _s(took_s), "█" * round(_BAR * min(took_s / total_s, 1.0)))
    table.add_row("total", _s(report["elapsed_s"]), "")
    return table


def _candidates(report: dict[str, Any]) -> RenderableType:
    candidates = report["candidates"]
    if not candidates:
        return Text("no candidates: the request was never placed")
    table = Table("", "candidate", "cost", "to compute", "terms above zero", box=None)
    table.columns[1].overflow = "fold"
    for column in (table.columns[2], table.columns[3]):
        column.no_wrap = True
    for candidate in candidates[:_SHOWN_CANDIDATES]:
        pair = (candidate["prefill"], candidate["decode"])
        chosen = report["chosen"] and pair == (
            report["chosen"]["prefill"],
            report["chosen"]["decode"],
        )
        table.add_row(
            "→" if chosen else "",
            escape(" → ".join(filter(None, pair))),
            _s(candidate["cost_s"]),
            str(candidate["uncached_tokens"]),
            _terms(candidate["terms"]),
            style="bold" if chosen else "",
        )
    if len(candidates) > _SHOWN_CANDIDATES:
        table.add_row("", f"and {len(candidates) - _SHOWN_CANDIDATES} more: --json")
    return table


def _terms(terms: dict[str, float]) -> str:
    """Return the terms of a cost that are not zero."""
    named = ((name.removesuffix("_s"), terms.get(name, 0.0)) for name in Terms._fields)
    return ", ".join(f"{name} {_s(value)}" for name, value in named if value)


def _timeline(report: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 1))
    for event in report["timeline"]:
        table.add_row(f"{event['at_s']:.3f} s", escape(event["event"]))
    return table


def _s(seconds: float) -> str:
    if seconds == 0:
        return "0"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
