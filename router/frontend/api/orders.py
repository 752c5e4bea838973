"""``POST /fleet/orders``: admin commands for the fleet's controller (`baton drain --url …`).

    {"verb": "drain", "workers": ["worker-1"], "arguments": {}, "timeout_s": 5}

The response is ``{"data": …}``. An operator's key or the fleet token is always required, even if
requests need no key. ``fleet/pools/orders.py`` defines the verbs.
"""

from typing import Annotated, Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.registry.orders import Answer, Orders
from baton.registry.redis_store import RegistryUnavailableError
from baton.types.errors import InvalidRequestError, UnauthorizedError, UnavailableError
from router.frontend.access import check_operator, has_operator_key, who_of
from router.frontend.api.parts import Endpoints, RouterParts, read_body
from router.frontend.audited import source_of

_SUPERVISOR_VERBS = ("stop",)


class _OrderBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    verb: Annotated[str, Field(pattern=r"^[a-z]{1,16}$")]
    workers: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=1024)] = []
    arguments: dict[str, int | bool | Annotated[str, Field(max_length=256)]] = {}
    timeout_s: Annotated[float, Field(gt=0, le=60)] = 5.0


def routes(router: RouterParts, orders: Orders) -> Endpoints:
    """Return the endpoint of admin commands."""
    api = Endpoints()

    @api.post("/fleet/orders", include_in_schema=False)
    async def order(request: Request) -> dict[str, Any]:
        """Send an admin command to the controller and wait for its answer."""
        check_operator(request.headers, router.settings)
        if not has_operator_key(request.headers, router.settings):
            raise UnauthorizedError("an operator's API key or the fleet token is required")
        try:
            body = _OrderBody.model_validate_json(await read_body(request, router))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "body"
            raise InvalidRequestError.at(where, f"{first['msg']}") from error
        if body.verb in _SUPERVISOR_VERBS:
            raise InvalidRequestError.at("verb", f"{body.verb} is available only to the supervisor")
        who = who_of(request.headers, router.settings)
        answer = await _ask(orders, body, who, source_of(request))
        return {"data": answer.data}

    @api.get("/fleet/planner")
    async def planner(request: Request) -> dict[str, Any]:
        """Return the planner's mode and its last decisions, the newest first, with figures."""
        check_operator(request.headers, router.settings)
        answer = await _ask(orders, _OrderBody(verb="plan"))
        return dict(answer.data)

    return api


async def _ask(orders: Orders, body: _OrderBody, who: str = "", source: str = "") -> Answer:
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
