"""Every route with every method, called by nobody, by tenants, by operators: who gets an answer."""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import AsyncMock

from baton.config.clients import ApiKeyConfig
from tests.router.emulated_worker import Script

KEYS = {
    "key-of-one": ApiKeyConfig(tenant="one"),
    "key-of-owner": ApiKeyConfig(tenant="owner", adapters="own"),
    "key-of-ops": ApiKeyConfig(tenant="ops", role="operator"),
}
CALLERS = ("", "no such key", *KEYS, "secret")  # the last is the fleet's token
METHODS = ("GET", "POST", "DELETE", "PUT", "PATCH")

EVERYBODY = {
    *("/", "/docs", "/openapi.json", "/page/{name}", "/version"),  # these hold nothing of anybody
    *("/health", "/ping", "/health/live", "/health/ready"),
}
OPERATORS = {
    *("/load", "/metrics", "/fleet", "/fleet/targets", "/fleet/series", "/fleet/orders"),
    "/fleet/planner",
}
OWNERS = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}

REFUSED = (401, 403)


def paths_of(app) -> Iterator[str]:
    """Every path that the application serves."""
    routes = list(app.routes)
    for included in app.routes:  # FastAPI keeps what was included as one route
        routes += getattr(getattr(included, "original_router", None), "routes", [])
    yield from sorted({route.path for route in routes if hasattr(route, "path")})


def refusals(path: str) -> list[int | None]:
    """What each of the callers is refused with; None: it is let in."""
    if path in EVERYBODY:
        return [None] * len(CALLERS)
    one, owner = (
        (403, 403) if path in OPERATORS else (403, None) if path in OWNERS else (None, None)
    )
    return [401, 401, one, owner, None, None]


async def test_each_route_lets_in_whom_it_should(make_fleet):
    """A route that is new needs a key, or a line above."""
    orders = SimpleNamespace(ask=AsyncMock(return_value=None))  # no controller answers
    fleet = await make_fleet({"decode-0": Script(step_s=0.001)}, api_keys=KEYS, fleet_orders=orders)
    answered = 0
    paths = list(paths_of(fleet.app()))
    assert set(paths) > EVERYBODY | OPERATORS | OWNERS
    for path in paths:
        url, served = re.sub(r"\{[^}]*\}", "x", path), False
        for method in METHODS:
            statuses = []
            for key in CALLERS:
                headers = {"authorization": f"Bearer {key}"} if key else {}
                body = None if method in ("GET", "DELETE") else {}
                answer = await fleet.http.request(method, url, json=body, headers=headers)
                statuses.append(answer.status_code)
            if set(statuses) == {405}:
                continue
            found = [status if status in REFUSED else None for status in statuses]
            assert (method, path, found) == (method, path, refusals(path))
            assert 500 not in statuses
            served, answered = True, answered + 1
        assert served, path
    assert answered >= 50
