"""Lets good and bad versions of a model answer half of a load, and measures the rollbacks.

The fleet serves three versions of one model. Each candidate in turn becomes a canary of version 1:

- ``equal``: version 2, which is as fast; it should stay.
- ``slow``: version 3, whose timing needs nearly twice as long for the prompts; its TTFT should end
  it.
- ``wrong``: version 2, which fails the golden prompts that it receives under load; these should
  end it.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from loadtest.client.processes import run_clients
from loadtest.client.records import CallRecord, ServerOptions
from loadtest.client.server import ServerError
from loadtest.commands.options import echo
from loadtest.drill.fleet import DrillError, FleetView
from loadtest.lab.canary_findings import MeasuredCandidate, findings_of
from loadtest.lab.places import awaiting
from loadtest.lab.results import Findings
from loadtest.lab.table import LABS, LabContext
from loadtest.percent import percent
from loadtest.workloads.lengths import parse_lengths
from loadtest.workloads.synthetic import OpenLoop, open_loop_plan

NAME = "chat"
_RATE = 8.0
_SHARE = 0.5
_SECONDS = 60.0
_QUICK_SECONDS = 30.0
_WRONG_AFTER_S = 5.0
_POLL_S = 0.1
_SETTLE_S = 2.0
_GOLDEN = {"name": "wrong", "prompt": "Once upon a time", "max_tokens": 2, "tokens": [1, 1]}


def run(context: LabContext) -> Findings:
    """Try each candidate in the fleet of the context.

    Raises:
        ServerError: The fleet does not serve the versions, or refuses a change.
    """
    seconds = _QUICK_SECONDS if context.quick else _SECONDS
    try:
        return asyncio.run(_run(context, seconds))
    except DrillError as error:
        raise ServerError(str(error)) from error


async def _run(context: LabContext, seconds: float) -> Findings:
    candidates = []
    async with FleetView(context.url, context.api_key) as fleet:
        names = [one["name"] for one in (await fleet.models())["models"]]
        if missing := [name for name in LABS["canary"].timings if name not in names]:
            raise DrillError(f"the fleet does not serve {missing[0]}: the lab starts its own fleet")
        tried = (("equal", f"{NAME}@2"), ("slow", f"{NAME}@3"), ("wrong", f"{NAME}@2"))
        for number, (kind, model) in enumerate(tried, 1):
            load = f"{percent(_SHARE, 0)} of {_RATE:g} requests/s for {seconds:g} s"
            echo(f"[dim]candidate {number} of {len(tried)}, {kind}: {model} gets {load}[/]")
            with awaiting("the load", _SETTLE_S + seconds):
                candidates.append(await _candidate(fleet, context, kind, model, seconds))
    return findings_of(candidates, rate=_RATE, share=_SHARE, seconds=seconds)


async def _candidate(
    fleet: FleetView, context: LabContext, kind: str, model: str, seconds: float
) -> MeasuredCandidate:
    await _change(fleet, {"verb": "alias", "name": NAME, "model": f"{NAME}@1"})
    await _change(fleet, {"verb": "canary", "name": NAME, "model": model, "share": _SHARE})
    await asyncio.sleep(_SETTLE_S)
    ended = asyncio.Event()
    records, watched = await asyncio.gather(
        _load(context, seconds, ended), _watch(fleet, kind, model, ended)
    )
    if kind == "wrong":
        await _change(fleet, {"verb": "gate", "name": model, "golden": []})
    if watched.out_s is None:
        await _change(fleet, {"verb": "rollback", "name": NAME})
    return MeasuredCandidate(
        kind=kind,
        model=model,
        requests=watched.requests,
        out_s=watched.out_s,
        reason=watched.reason,
        sent=len(records),
        failed=sum(record.end != "ok" for record in records),
    )


@dataclass(slots=True)
class _Watched:
    requests: int = 0
    out_s: float | None = None
    reason: str = ""


async def _watch(fleet: FleetView, kind: str, model: str, ended: asyncio.Event) -> _Watched:
    """Follow the gate of the canary until the load has ended."""
    watched = _Watched()
    before = 0
    began_s = time.monotonic()
    if kind == "wrong":
        await asyncio.sleep(_WRONG_AFTER_S)
        before = _requests(await _entry(fleet))
        began_s = time.monotonic()
        await _change(fleet, {"verb": "gate", "name": model, "golden": [_GOLDEN]})
    while not ended.is_set() and watched.out_s is None:
        entry = await _entry(fleet)
        if entry.get("thrown_out"):
            watched.out_s = time.monotonic() - began_s
            watched.reason = entry["reason"]
        else:
            watched.requests = _requests(entry) - before
        await asyncio.sleep(_POLL_S)
    return watched


async def _entry(fleet: FleetView) -> dict[str, Any]:
    route: dict[str, Any] = (await fleet.models())["routes"].get(NAME, {})
    return route


def _requests(entry: dict[str, Any]) -> int:
    gate = entry.get("gate")
    return int(gate["canary"]["requests"]) if gate else 0


async def _load(context: LabContext, seconds: float, ended: asyncio.Event) -> list[CallRecord]:
    shape = OpenLoop(
        requests=round(_RATE * seconds),
        rate=_RATE,
        prompt_tokens=parse_lengths("uniform:384-640"),
        answer_tokens=parse_lengths("uniform:16-32"),
    )
    records: list[CallRecord] = []
    options = ServerOptions(url=context.url, model=NAME, api_key=context.api_key)
    plan = open_loop_plan(shape, name="canary", seed=time.time_ns() % 2**31)
    try:
        await run_clients(plan, options, clients=1, record=records.append)
    finally:
        ended.set()
    return records


async def _change(fleet: FleetView, body: dict[str, Any]) -> None:
    if problem := await fleet.change_models(body):
        raise DrillError(f"{body['verb']} {body['name']}: {problem}")
