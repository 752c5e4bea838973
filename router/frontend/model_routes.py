"""Endpoints ``/fleet/models`` for `baton models`: lanes, and the names that lead to them.

GET  /fleet/models    models with their workers, and the routes of names
POST /fleet/models    {"verb": "canary", "name": "chat", "model": "v2", "share": 0.05}
"""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.registry.orders import Orders
from baton.registry.redis_store import RegistryUnavailableError
from baton.types.errors import InvalidRequestError, UnavailableError
from baton.types.routes import NameRoute, RouteTable
from router.frontend.access import check_operator, who_of
from router.frontend.api.orders import ask
from router.frontend.api.parts import Endpoints, RouterParts, read_body
from router.frontend.audited import audited
from router.routing.lanes.routes import (
    RouteChangeError,
    models_of,
    promoted,
    rolled_back,
    with_alias,
    with_canary,
    with_fallbacks,
    without,
)

_LOG = logging.getLogger(__name__)

_Name = Annotated[str, Field(min_length=1, max_length=200)]


class _ChangeBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    verb: Literal["alias", "canary", "fallback", "promote", "rollback", "remove", "load", "unload"]
    name: _Name
    model: _Name | None = None
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    tenants: Annotated[list[_Name], Field(max_length=256)] | None = None
    fallbacks: Annotated[list[_Name], Field(max_length=16)] = []


def routes(router: RouterParts, desks: Mapping[str, Orders]) -> Endpoints:
    """Return the endpoints of models. Both are for operators.

    ``desks`` are the queues of each model's controller.
    """
    api = Endpoints()

    @api.get("/fleet/models", include_in_schema=False)
    async def listed(request: Request) -> dict[str, Any]:
        """List the models with their workers and versions, and the routes of names."""
        check_operator(request.headers, router.settings)
        return {
            "models": [_lane(lane) for lane in router.lanes],
            "routes": _shown(router.routes.table),
        }

    @api.post("/fleet/models", include_in_schema=False)
    async def change(request: Request) -> dict[str, Any]:
        """Change the models of a name. Every router applies it within a second."""
        check_operator(request.headers, router.settings)
        try:
            body = _ChangeBody.model_validate_json(await read_body(request, router))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "body"
            raise InvalidRequestError.at(where, first["msg"]) from error
        if body.verb in ("load", "unload"):
            lane = _lane_to_load(router, body)
            name = lane.model.names[0]
            if name not in desks:
                raise UnavailableError("this router has no connection to the fleet's Redis")
            await ask(desks[name], body.verb, who_of(request.headers, router.settings))
            return {"name": name, "route": None}
        try:
            before, after = await router.routes.change(lambda table: _edited(router, table, body))
        except RouteChangeError as error:
            raise InvalidRequestError(str(error)) from error
        except RegistryUnavailableError as error:
            raise UnavailableError(
                "the fleet's Redis is unavailable, so names keep their models; repeat the command "
                "when it answers"
            ) from error
        _LOG.info("changed the route: name=%s verb=%s", body.name, body.verb)
        shown = _entry(after.names.get(body.name))
        was = _entry(before.names.get(body.name))
        await audited(router, request, f"models {body.verb}", body.name, before=was, after=shown)
        return {"name": body.name, "route": shown}

    return api


def _lane_to_load(router: RouterParts, body: _ChangeBody) -> RouterParts:
    """Return the lane of a model to load or unload."""
    lane = router.lanes.base(body.name, "name")
    if body.verb == "load":
        return lane
    for name, entry in router.routes.table.names.items():
        if lane.model.serves(entry.target) or (entry.canary and lane.model.serves(entry.canary)):
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


def _edited(router: RouterParts, table: RouteTable, body: _ChangeBody) -> RouteTable:
    """Return the table after a change, all of whose models are served."""
    if body.verb == "remove":
        return without(table, body.name)
    if body.verb in ("alias", "canary") and body.model is None:
        raise RouteChangeError(f"{body.verb} needs a model")
    model = body.model or ""
    match body.verb:
        case "alias":
            made = with_alias(table, body.name, model)
        case "canary":
            tenants = None if body.tenants is None else tuple(body.tenants)
            made = with_canary(table, body.name, model, body.share, tenants)
        case "fallback":
            made = with_fallbacks(table, body.name, tuple(body.fallbacks))
        case "promote":
            made = promoted(table, body.name)
        case _:
            made = rolled_back(table, body.name)
    entry = made.names.get(body.name, NameRoute(target=body.name))
    for name in sorted(models_of(entry) - {entry.previous}):
        if not any(lane.model.serves(name) for lane in router.lanes):
            served = ", ".join(router.lanes.served_names())
            raise RouteChangeError(f"{name} is not served; this fleet serves {served}")
    return made


def _lane(lane: RouterParts) -> dict[str, Any]:
    artifact = lane.model.artifact
    workers = Counter(slot.state for slot in lane.gateway.workers)
    return {
        "name": lane.model.names[0],
        "names": list(lane.model.names),
        "version": lane.model.version,
        "loaded": lane.is_loaded,
        "source": artifact.source,
        "revision": artifact.revision,
        "license": artifact.license,
        "workers": dict(workers),
        "running": lane.gateway.in_flight - lane.gateway.admission.waiting,
        "waiting": lane.gateway.admission.waiting,
    }


def _shown(table: RouteTable) -> dict[str, Any]:
    return {name: _entry(entry) for name, entry in table.names.items()}


def _entry(entry: NameRoute | None) -> dict[str, Any] | None:
    return None if entry is None else msgspec.structs.asdict(entry)
