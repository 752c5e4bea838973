"""``POST /fleet/orders``: what `baton drain --url …` and its like ask of the fleet's controller.

    {"verb": "drain", "workers": ["decode-0"], "arguments": {}, "timeout_s": 5}

The answer is ``{"data": …}``. It changes the fleet, so it needs an operator's key or the fleet's
token also where requests need no key. Verbs: ``fleet/pools/orders.py``.
"""

from typing import Annotated, Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.registry.orders import Orders
from baton.registry.redis_store import RegistryUnavailableError
from baton.types.errors import InvalidRequestError, UnauthorizedError, UnavailableError
from router.frontend.access import check_operator, has_operator_key
from router.frontend.api.parts import Endpoints, RouterParts, read_body

_BY_THE_SUPERVISOR_ALONE = ("stop",)


class _OrderBody(BaseModel):
    """The body of an order."""

    model_config = ConfigDict(extra="forbid")

    verb: Annotated[str, Field(pattern=r"^[a-z]{1,16}$")]
    workers: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=1024)] = []
    arguments: dict[str, int | bool | Annotated[str, Field(max_length=256)]] = {}
    timeout_s: Annotated[float, Field(gt=0, le=60)] = 5.0


def routes(router: RouterParts, orders: Orders) -> Endpoints:
    """The one endpoint."""
    api = Endpoints()

    @api.post("/fleet/orders", include_in_schema=False)
    async def order(request: Request) -> dict[str, Any]:
        """Hand an order to the controller and wait for what it says."""
        check_operator(request.headers, router.settings)
        if not has_operator_key(request.headers, router.settings):
            raise UnauthorizedError("orders need the key of an operator, or the fleet's token")
        try:
            body = _OrderBody.model_validate_json(await read_body(request, router))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"])) or "body"
            raise InvalidRequestError(f"{where}: {first['msg']}", param=where) from error
        if body.verb in _BY_THE_SUPERVISOR_ALONE:
            raise InvalidRequestError(f"{body.verb} is not for routers to ask", param="verb")
        try:
            answer = await orders.ask(body.verb, body.workers, body.arguments, body.timeout_s)
        except RegistryUnavailableError as error:
            raise UnavailableError("the fleet's Redis cannot be reached now") from error
        if answer is None:
            raise UnavailableError("the fleet's controller did not answer")
        if answer.problem:
            raise InvalidRequestError(answer.problem)
        return {"data": answer.data}

    return api
