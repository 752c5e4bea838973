"""``POST /fleet/orders``: admin commands for the fleet's controller (`baton drain --url …`).

    {"verb": "drain", "workers": ["worker-1"], "arguments": {}, "timeout_s": 5}

The response is ``{"data": …}``. An operator's key or the fleet token is always required, even if
requests need no key. ``fleet/pools/admin_commands.py`` defines the verbs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from time import monotonic
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from pydantic import Field

from baton.registry.admin_commands import AdminCommands, CommandReply
from baton.registry.redis_store import RegistryUnavailableError
from baton.types.errors import InvalidRequestError, UnavailableError
from router.frontend.api.bodies.common import OperatorBody
from router.frontend.api.bodies.parse import parse_operators
from router.frontend.api.endpoints import Endpoints, read_body
from router.frontend.audited import source_of
from router.process import Process

_SUPERVISOR_VERBS = ("stop",)
_FREE = {"free_cpus", "free_gpus"}
_OF_ALL = ("ping", "slots", "nodes", "restart", "roll", "close", "open")


_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # msgpack has no larger ones


class _CommandBody(OperatorBody):
    verb: Annotated[str, Field(pattern=r"^[a-z]{1,16}$")]
    workers: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=1024)] = Field(
        default_factory=list
    )
    arguments: dict[str, _Int64 | bool | Annotated[str, Field(max_length=256)]] = Field(
        default_factory=dict
    )
    timeout_s: Annotated[float, Field(gt=0, le=60)] = 5.0
    model: Annotated[str, Field(max_length=200)] | None = None


def routes(router: Process, desks: Mapping[str, AdminCommands]) -> Endpoints:
    """Return the endpoint of admin commands; ``desks`` are the queues of each model's controller.

    A command is for the model in ``model`` or of its workers. Without both, commands about all
    workers or nodes go to all models, and others need a model if there are several.
    """
    api = Endpoints()
    _add_sleep(api, router, desks)

    @api.post("/fleet/orders", include_in_schema=False)
    async def order(request: Request) -> dict[str, Any]:
        """Send an admin command to the controller and wait for its answer."""
        router.access.check_change(request.headers)
        body = parse_operators(_CommandBody, await read_body(request, router))
        if body.verb in _SUPERVISOR_VERBS:
            raise InvalidRequestError.at("verb", f"{body.verb} is available only to the supervisor")
        who = router.access.name(request.headers)
        source = source_of(request)
        answers = [
            (await ask(desks[name], body, who, source)).data
            for name in _models_of(router, body, list(desks))
        ]
        return {"data": answers[0] if len(answers) == 1 else _merged(body.verb, answers)}

    @api.get("/fleet/planner")
    async def planner(request: Request, model: str | None = None) -> dict[str, Any]:
        """Return the planner's mode and its last decisions, the newest first, with figures.

        Each model has its own planner; the default is the first model.
        """
        router.access.check_operator(request.headers)
        name = next(iter(desks))
        if model is not None:
            name = router.lanes.base(model, "model").model.names[0]
        answer = await ask(desks[name], "plan")
        return dict(answer.data)

    return api


def _add_sleep(api: Endpoints, router: Process, desks: Mapping[str, AdminCommands]) -> None:
    async def tell_all(
        request: Request, command: _CommandBody, is_done: Callable[[], Awaitable[bool]]
    ) -> bool:
        """Send a command to the controllers; return whether it was done in time."""
        router.access.check_change(request.headers)
        for desk in desks.values():
            await ask(desk, command, router.access.name(request.headers), source_of(request))
        until_s = monotonic() + 600.0
        while not await is_done():
            if monotonic() > until_s:
                return False
            await asyncio.sleep(0.2)
        await asyncio.sleep(0.5)  # then all routers know
        return True

    async def are_gone() -> bool:
        return not any([(await ask(desk, "slots")).data for desk in desks.values()])

    async def are_awake() -> bool:
        of = (lane.gateway for lane in router.lanes)
        return all(each.workers.usable or each.starts_from_zero for each in of)

    @api.post("/sleep", include_in_schema=False)
    async def sleep(
        request: Request,
        level: Annotated[int, Query(ge=1, le=2)] = 1,
        mode: Literal["abort", "wait"] = "abort",
    ) -> dict[str, Any]:
        """Stop the workers of all models, and return when they have ended.

        ``abort`` ends requests with the tokens that they have, ``wait`` lets them end. Both levels
        free all memory. Level 0 and ``keep`` would keep it: they are refused.
        """
        command = _CommandBody(verb="unload", arguments={"abort": mode == "abort"})
        if not await tell_all(request, command, are_gone):
            raise UnavailableError("the workers have not ended yet; they take no new requests")
        return {"status": "sleeping", "level": level}

    @api.post("/wake_up", include_in_schema=False)
    async def wake_up(
        request: Request, tags: Annotated[list[str] | None, Query(max_length=16)] = None
    ) -> dict[str, Any]:
        """Start the workers of models without any, and return when each model has a ready one."""
        command = _CommandBody(verb="load", arguments={"asleep": True})
        done = await tell_all(request, command, are_awake)
        return {"status": "awake" if done else "sleeping", "tags": tags}

    @api.get("/is_sleeping", include_in_schema=False)
    async def is_sleeping(request: Request) -> dict[str, bool]:
        """Return whether no model should have workers."""
        router.access.check_operator(request.headers)
        of = (lane.is_loaded or lane.gateway.starts_from_zero for lane in router.lanes)
        return {"is_sleeping": not any(of)}


def _models_of(router: Process, body: _CommandBody, names: list[str]) -> list[str]:
    """Return the models that a command is for."""
    if len(names) == 1:
        return names
    if body.model is not None:
        return [router.lanes.base(body.model, "model").model.names[0]]
    named = {
        lane.model.names[0]
        for lane in router.lanes
        for worker_id in body.workers
        if lane.gateway.workers.get(worker_id) is not None
    }
    if len(named) > 1:
        raise InvalidRequestError.at("workers", f"belong to several models: {', '.join(named)}")
    if named:
        return list(named)
    if body.verb == "logs":  # all models have one folder of logs
        return names[:1]
    if body.verb in _OF_ALL and not body.workers:
        return names
    raise InvalidRequestError.at("model", f"is required: this fleet serves {', '.join(names)}")


def _merged(verb: str, answers: list[Any]) -> Any:
    """Return the answers of several controllers to one command as one."""
    items = [item for answer in answers for item in answer or ()]
    if verb != "nodes":
        return items
    nodes: dict[str, dict[str, Any]] = {}
    for node in items:
        known = nodes.setdefault(node["address"], node)
        if known is not node:
            known["workers"] += node["workers"]
            for name in known.keys() & _FREE:  # each lane knows its own reservations at once
                known[name] = min(known[name], node[name])
    return list(nodes.values())


async def ask(
    orders: AdminCommands, command: _CommandBody | str, who: str = "", source: str = ""
) -> CommandReply:
    """Send a command, or one without arguments by its verb, and return the controller's answer.

    Raises:
        InvalidRequestError: The controller refuses it.
        UnavailableError: The controller or Redis does not answer.
    """
    body = _CommandBody(verb=command) if isinstance(command, str) else command
    try:
        answer = await orders.ask(
            body.verb, body.workers, body.arguments, body.timeout_s, who, source
        )
    except RegistryUnavailableError as error:
        raise UnavailableError("the fleet's Redis is unavailable") from error
    if answer is None:
        raise UnavailableError("the fleet's controller did not answer")
    if answer.problem:
        raise InvalidRequestError(answer.problem)
    return answer
