"""Endpoints ``/fleet/models`` for `baton models`: lanes, and the names that lead to them.

GET  /fleet/models    models with their workers, and the routes of names
POST /fleet/models    {"verb": "canary", "name": "chat", "model": "v2", "share": 0.05}

A model with golden prompts becomes a canary only after right answers of all its workers.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Request
from pydantic import Field

from baton.registry.admin_commands import AdminCommands
from baton.registry.redis_store import RegistryUnavailableError
from baton.registry.shared_adapters import AdapterEntry
from baton.types.errors import InvalidRequestError, UnavailableError
from baton.types.gates import MAX_GOLDEN, GoldenPrompt, GoldenRound
from baton.types.routes import NameRoute, RouteTable
from baton.types.versioned import TableChangeError
from router.frontend.api.bodies.common import OperatorBody
from router.frontend.api.bodies.parse import parse_operators
from router.frontend.api.endpoints import Endpoints, read_body
from router.frontend.audited import audited
from router.frontend.operators.admin_commands import ask
from router.frontend.operators.gates.golden import GoldenRunner, golden_of
from router.frontend.operators.gates.report import gate_state, round_state
from router.frontend.operators.gates.warm import warm
from router.lane import Lane
from router.lanes.routes import (
    leads_to,
    models_of,
    promoted,
    rolled_back,
    route_entry,
    with_alias,
    with_canary,
    with_entry,
    with_fallbacks,
    with_golden,
    with_shadow,
    without,
)
from router.process import Process

_LOG = logging.getLogger(__name__)

_Name = Annotated[str, Field(min_length=1, max_length=200)]


class _ChangeBody(OperatorBody):
    verb: Literal[
        "alias",
        "canary",
        "shadow",
        "fallback",
        "promote",
        "rollback",
        "remove",
        "load",
        "unload",
        "gate",
    ]
    name: _Name
    model: _Name | None = None
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    tenants: Annotated[list[_Name], Field(max_length=256)] | None = None
    fallbacks: Annotated[list[_Name], Field(max_length=16)] = Field(default_factory=list)
    golden: Annotated[list[dict[str, Any]], Field(max_length=MAX_GOLDEN)] | None = None


def routes(router: Process, desks: Mapping[str, AdminCommands]) -> Endpoints:
    """Return the endpoints of models. Both are for operators.

    ``desks`` are the queues of each model's controller.
    """
    api = Endpoints()
    runner = GoldenRunner(router)

    @api.get("/fleet/models", include_in_schema=False)
    async def listed(request: Request) -> dict[str, Any]:
        """List the models with their workers and versions, and the routes of names."""
        router.access.check_operator(request.headers)
        return {
            "models": [_lane(router, lane) for lane in router.lanes],
            "routes": {
                name: {
                    **msgspec.structs.asdict(entry),
                    "gate": gate_state(router.gates.get(name)),
                }
                for name, entry in router.routes.table.names.items()
            },
        }

    @api.post("/fleet/models", include_in_schema=False)
    async def change(request: Request) -> dict[str, Any]:
        """Change the models of a name. Every router applies it within a second."""
        router.access.check_change(request.headers)
        body = parse_operators(_ChangeBody, await read_body(request, router))
        if body.verb in ("load", "unload"):
            lane = _lane_to_load(router, body)
            name = lane.model.names[0]
            if name not in desks:
                raise UnavailableError("this router has no connection to the fleet's Redis")
            await ask(desks[name], body.verb, router.access.name(request.headers))
            return {"name": name, "route": None}
        if body.verb == "gate":
            return await gate(request, body)
        golden = None
        if body.verb == "canary" and body.model is not None:
            golden = await _passed(router, runner, body.model)
        await _warm(router, body)
        now_ms = time.time_ns() // 10**6
        before, after = await _change(router, lambda table: _edited(router, table, body, now_ms))
        _LOG.info("changed the route: name=%s verb=%s", body.name, body.verb)
        shown = route_entry(after.names.get(body.name))
        was = route_entry(before.names.get(body.name))
        await audited(router, request, f"models {body.verb}", body.name, before=was, after=shown)
        return {"name": body.name, "route": shown, "golden": round_state(golden)}

    async def gate(request: Request, body: _ChangeBody) -> dict[str, Any]:
        """Replace a model's golden prompts if the body has any, and run them."""
        router.lanes.of(body.name)
        if body.golden is not None:
            prompts = _prompts(body.golden)
            before, _ = await _change(router, lambda table: with_golden(table, body.name, prompts))
            was = len(before.golden.get(body.name, ()))
            await audited(router, request, "models gate", body.name, before=was, after=len(prompts))
        if not golden_of(router, body.name):
            return {"name": body.name, "route": None, "golden": None}
        golden = await runner.run(body.name, everywhere=True)
        return {"name": body.name, "route": None, "golden": round_state(golden)}

    return api


def _lane_to_load(router: Process, body: _ChangeBody) -> Lane:
    """Return the lane of a model to load or unload."""
    lane = router.lanes.base(body.name, "name")
    if body.verb == "load":
        return lane
    for name, entry in router.routes.table.names.items():
        if any(lane.model.serves(model) for model in leads_to(entry)):
            raise InvalidRequestError.at(
                "name",
                f"{name} leads to {body.name}: use `baton models alias`, `rollback` or `remove` "
                "first",
            )
    if not any(other.is_loaded for other in router.lanes if other is not lane):
        raise InvalidRequestError.at(
            "name", f"{body.name} is the only model with workers; stop the fleet with `baton down`"
        )
    return lane


async def _change(
    router: Process, edit: Callable[[RouteTable], RouteTable]
) -> tuple[RouteTable, RouteTable]:
    """Change the table of all routers; return the tables before and after."""
    try:
        return await router.routes.change(lambda table, _: edit(table))
    except TableChangeError as error:
        raise InvalidRequestError(str(error)) from error
    except RegistryUnavailableError as error:
        raise UnavailableError(
            "the fleet's Redis is unavailable, so names keep their models; repeat the command "
            "when it answers"
        ) from error


async def _passed(router: Process, runner: GoldenRunner, model: str) -> GoldenRound | None:
    """Run the golden prompts of a model at all its workers; None if it has none.

    Raises:
        InvalidRequestError: An answer is wrong or missing.
    """
    if not router.lanes.serves(model) or not golden_of(router, model):
        return None
    golden = await runner.run(model, everywhere=True)
    if not golden.passed:
        name, problem = next(iter({**golden.wrong, **golden.failed}.items()))
        raise InvalidRequestError.at(
            "model",
            f"{model} gets no requests: {len(golden.wrong) + len(golden.failed)} golden prompts "
            f"failed; {name!r}: {problem}",
        )
    return golden


async def _warm(router: Process, body: _ChangeBody) -> None:
    """Load the adapter that is to answer a name, if it is one, at all workers of its model."""
    entry = router.routes.table.names.get(body.name)
    model = body.model if body.verb in ("alias", "canary", "shadow") else None
    if body.verb == "promote" and entry is not None:
        model = entry.canary
    if model and router.lanes.serves(model):
        await warm(router.lanes.of(model), model)


def _prompts(raw: list[dict[str, Any]]) -> tuple[GoldenPrompt, ...]:
    try:
        return msgspec.convert(raw, tuple[GoldenPrompt, ...])
    except msgspec.ValidationError as error:
        raise InvalidRequestError.at("golden", str(error)) from error


def _edited(router: Process, table: RouteTable, body: _ChangeBody, now_ms: int) -> RouteTable:
    """Return the table after a change, all of whose models are served."""
    if body.verb == "remove":
        return without(table, body.name)
    if body.verb in ("alias", "canary", "shadow") and body.model is None:
        raise TableChangeError(f"{body.verb} needs a model")
    model = router.lanes.own_name(body.model or "")
    if (entry := router.lanes.entry(table, body.name)) is not None:
        table = with_entry(table, body.name, entry)
    match body.verb:
        case "alias":
            made = with_alias(table, body.name, model)
        case "canary":
            tenants = None if body.tenants is None else tuple(body.tenants)
            made = with_canary(table, body.name, model, body.share, tenants, now_ms=now_ms)
        case "shadow":
            made = with_shadow(table, body.name, model, body.share, now_ms=now_ms)
        case "fallback":
            made = with_fallbacks(table, body.name, tuple(body.fallbacks))
        case "promote":
            made = promoted(table, body.name)
        case _:
            made = rolled_back(table, body.name)
    entry = made.names.get(body.name, NameRoute(target=body.name))
    for name in sorted(models_of(entry) - {entry.previous}):
        if not router.lanes.serves(name):
            served = ", ".join(router.lanes.served_names())
            raise TableChangeError(f"{name} is not served; this fleet serves {served}")
        adapter = router.lanes.of(name).model.adapters.find(name)
        if adapter is not None and adapter.owner:
            raise TableChangeError(
                f"{name} is an adapter of the tenant {adapter.owner}; a name needs an adapter that "
                "all tenants may use"
            )
    return made


def _lane(router: Process, lane: Lane) -> dict[str, Any]:
    artifact = lane.model.artifact
    slots = [slot for slot in lane.gateway.workers if slot.is_kept or slot.state != "dead"]
    workers = Counter(slot.state for slot in slots)
    return {
        "name": lane.model.names[0],
        "names": list(lane.model.names),
        "version": lane.model.version,
        "loaded": lane.is_loaded,
        "source": artifact.source,
        "revision": artifact.revision,
        "license": artifact.license,
        "golden": len(golden_of(router, lane.model.names[0])),
        "workers": dict(workers),
        "running": lane.gateway.in_flight - lane.gateway.admission.waiting,
        "waiting": lane.gateway.admission.waiting,
        "adapters": [_adapter(lane, entry) for entry in lane.model.adapters.served()],
    }


def _adapter(lane: Lane, entry: AdapterEntry) -> dict[str, Any]:
    statuses = [slot.link.status for slot in lane.gateway.workers.usable if slot.link is not None]
    digest = bytes.fromhex(entry.digest)
    held = sum(status is not None and digest in status.adapters for status in statuses)
    return {"name": entry.name, "version": entry.digest[:12], "held_by_workers": held}
