"""`baton explain`: why a request went where it went, and why it took so long."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fleet.cli.common import FleetOption, get_json, running_fleet
from router.routing.placement.cost import Terms

_BAR = 30
_SHOWN_CANDIDATES = 8


def explain(
    request_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[REQUEST_ID]",
            help="The answer's `x-request-id`. Without one, the slowest requests are listed.",
        ),
    ] = None,
    fleet: FleetOption = None,
    newest: Annotated[
        bool, typer.Option("--newest", help="List the latest instead of the slowest.")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=500)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="The router's answer, as it is.")] = False,
) -> None:
    """Say why a request was slow: its waits, its route and the price of every other one."""
    state = running_fleet(fleet)
    console = Console()
    if request_id is None:
        order = "newest" if newest else "slowest"
        answer = get_json(state, "/fleet/requests", limit=limit, order=order)
        shown: RenderableType = list_of(answer["requests"])
    else:
        answer = get_json(state, f"/fleet/requests/{request_id}")
        shown = Group(*(story_of(one) for one in answer.get("parts", [answer])))
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        console.print(shown)


def list_of(requests: list[dict[str, Any]]) -> RenderableType:
    """The list of requests, a sentence for each."""
    if not requests:
        return Text("no request yet")
    table = Table("took", "first token", "tokens", "request", box=None, padding=(0, 1))
    for column in table.columns[:3]:
        column.no_wrap = True
    for one in requests:
        first_s = one["first_token_s"]
        route = route_of(one)
        table.add_row(
            _s(one["elapsed_s"]),
            _s(first_s) if first_s is not None else "-",
            f"{one['prompt_tokens']} → {one['completion_tokens']}",
            Text.assemble((one["id"], "bold"), f"  {route}\n{one['sentence']}"),
        )
    return table


def route_of(one: dict[str, Any]) -> str:
    """``prefill-0 → decode-1``, or one worker's name, or what it waits for."""
    if one["decode"] is None:
        return "-" if one["state"] == "ended" else "waits"
    if one["prefill"] == one["decode"]:
        return str(one["decode"])
    return f"{one['prefill']} → {one['decode']}"


def story_of(story: dict[str, Any]) -> RenderableType:
    """One request, the sentence first."""
    route = story["route"] or {}
    head = Text.assemble((story["id"], "bold"), f"  {story['state']}, tenant {story['tenant']}")
    why = Text(story["why"]["sentence"], style="bold yellow")
    where = "was not placed"
    if route:
        where = f"{route['mode']}: {route['prefill']} → {route['decode']}"
        where += f", {route['cached_tokens']} of {story['prompt_tokens']} prompt tokens cached"
    if story["regret_s"] is not None:
        where += f", regret {_s(story['regret_s'])}"
        if better := story["better"]:
            where += f" (better: {better['prefill'] or better['decode']} → {better['decode']})"
    if sources := story.get("prefix_from"):
        named = (f"{one['worker_id']} (up to block {one['blocks']})" for one in sources)
        where += "\nthe prompt's first blocks were asked of " + ", then ".join(named)
    parts: list[RenderableType] = [head, why, Text(where), Text(), _phases(story)]
    if story["longest_gaps"]:
        gaps = "; ".join(
            f"{_s(gap['gap_s'])} before token {gap['before_token']}"
            for gap in story["longest_gaps"]
        )
        parts += [Text(f"longest gaps: {gaps} (usually {_s(story['usual_gap_s'])})")]
    if (times := story["worker_times_s"]) and (times["preemptions"] or times["repaired_chunks"]):
        told = f"{times['preemptions']} preemptions, {times['repaired_chunks']} frames pulled again"
        parts.append(Text(told))
    parts += [Text(), _candidates(story), Text(), _timeline(story)]
    return Group(*parts)


def _phases(story: dict[str, Any]) -> Table:
    table = Table("phase", "took", "", box=None, padding=(0, 1))
    total_s = story["elapsed_s"] or 1.0
    for name, took_s in story["phases_s"].items():
        table.add_row(name, _s(took_s), "█" * round(_BAR * min(took_s / total_s, 1.0)))
    table.add_row("in all", _s(story["elapsed_s"]), "")
    return table


def _candidates(story: dict[str, Any]) -> RenderableType:
    candidates = story["candidates"]
    if not candidates:
        return Text("no candidates: it was never placed")
    names = [name.removesuffix("_s") for name in Terms._fields]
    table = Table("", "candidate", "cost", *names, "to compute", box=None, padding=(0, 1))
    for one in candidates[:_SHOWN_CANDIDATES]:
        pair = (one["prefill"], one["decode"])
        chosen = story["chosen"] and pair == (story["chosen"]["prefill"], story["chosen"]["decode"])
        table.add_row(
            "→" if chosen else "",
            escape(" → ".join(filter(None, pair))),
            _s(one["cost_s"]),
            *(_s(one["terms"].get(name, 0.0)) for name in Terms._fields),
            str(one["uncached_tokens"]),
            style="bold" if chosen else "",
        )
    if len(candidates) > _SHOWN_CANDIDATES:
        table.add_row("", f"and {len(candidates) - _SHOWN_CANDIDATES} more: --json")
    return table


def _timeline(story: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 1))
    for event in story["timeline"]:
        table.add_row(f"{event['at_s']:.3f} s", escape(event["event"]))
    return table


def _s(seconds: float) -> str:
    if seconds == 0:
        return "0"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
