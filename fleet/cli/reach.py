"""Access to a fleet: the one on this machine, or any by its router's URL and a key."""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from socket import gethostname
from typing import Annotated, Any

import httpx
import typer

from baton.printable import printable_json
from fleet.cli.common import FleetOption, RemoteFleet, bearer, fail, running_fleet
from fleet.local.audited import operator_name
from fleet.local.http_trust import trusted
from fleet.local.state import FleetState
from loadtest.reasons import http_reason

ModelOption = Annotated[
    str | None, typer.Option("--model", help="Model; needed if the fleet serves several.")
]


@dataclass(frozen=True, kw_only=True)
class FleetAddress:
    """Options that select a fleet: of this machine, or by the URL of a router."""

    fleet: FleetOption = None
    url: Annotated[
        str | None,
        typer.Option(
            "--url", envvar="BATON_URL", help="URL of a router elsewhere. Also BATON_URL."
        ),
    ] = None
    api_key: Annotated[
        str,
        typer.Option(
            "--api-key",
            envvar="BATON_API_KEY",
            help="Operator key for --url; as BATON_API_KEY it does not appear in `ps`.",
        ),
    ] = ""

    def reach(self) -> FleetState | RemoteFleet:
        """Return the fleet; exit with an error if there is none."""
        if self.url is None:
            return running_fleet(self.fleet)
        url = self.url.rstrip("/")
        return RemoteFleet(name=self.fleet or "fleet", url=url, fleet_token=self.api_key)


HERE = FleetAddress()


def client_of(
    fleet: str | None, url: str | None, headers: Mapping[str, str] | None = None
) -> httpx.Client:
    """Return a client of the local fleet's router or of ``url``, with the key in OPENAI_API_KEY."""
    here = running_fleet(fleet) if url is None else None
    return httpx.Client(
        base_url=here.url if here is not None else url or "",
        headers={**(headers or {}), **bearer(os.environ.get("OPENAI_API_KEY", ""))},
        timeout=600.0,
        trust_env=False,
        verify=trusted(here.certificate if here is not None else ""),
    )


def order(
    place: FleetState | RemoteFleet,
    verb: str,
    workers: Sequence[str] = (),
    arguments: Mapping[str, int | str | bool] | None = None,
    timeout_s: float = 5.0,
    model: str | None = None,
) -> Any:
    """Send an admin command to the fleet's controller; exit with an error if it is rejected.

    ``fleet/pools/admin_commands.py`` lists the verbs and their arguments. Each model of a
    fleet has a controller, which the router finds by ``model`` or by the workers.
    """
    # the client of Redis takes longer to load than most commands take
    from baton.registry.admin_commands import AdminCommands, CommandReply
    from baton.registry.redis_store import Registry, RegistryUnavailableError

    arguments = dict(arguments or {})
    if isinstance(place, RemoteFleet) or model is not None or _has_lanes(place):
        return _by_router(place, verb, list(workers), arguments, timeout_s, model)

    async def ask() -> CommandReply | None:
        registry = Registry(place.redis_url, place.fleet)
        try:
            return await AdminCommands(registry).ask(
                verb, workers, arguments, timeout_s, f"operator {operator_name()}", gethostname()
            )
        finally:
            await registry.close()

    try:
        answer = asyncio.run(ask())
    except RegistryUnavailableError as error:
        fail(f"{error}: the controller cannot be reached")
    if answer is None:
        fail("the controller did not respond; see `baton logs controller`")
    if answer.problem:
        fail(answer.problem)
    return answer.data


def _has_lanes(place: FleetState) -> bool:
    # A fleet of another version may have keys that this one does not know.
    return bool(json.loads(place.config_json or "{}").get("models"))


def _by_router(
    place: FleetState | RemoteFleet,
    verb: str,
    workers: list[str],
    arguments: dict[str, Any],
    timeout_s: float,
    model: str | None,
) -> Any:
    body = {"verb": verb, "workers": workers, "arguments": arguments, "timeout_s": timeout_s}
    if model is not None:
        body["model"] = model
    return ask_router(place, "POST", "/fleet/orders", body, timeout_s + 5.0)["data"]


def ask_router(
    place: FleetState | RemoteFleet,
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    timeout_s: float = 30.0,
) -> dict[str, Any]:
    """Call a router as an operator and return its JSON; exit with an error if it is rejected."""
    try:
        answer = httpx.request(
            method,
            f"{place.url}{path}",
            json=body,
            headers={**bearer(place.fleet_token), "x-baton-operator": operator_name()},
            timeout=timeout_s,
            trust_env=False,
            verify=trusted(place.certificate),
        )
        if answer.status_code != httpx.codes.OK:
            fail(f"{place.url}: {answer.json()['error']['message']}")
        response = printable_json(answer.json())
        if not isinstance(response, dict):
            raise TypeError("the response is no JSON object")
        return dict(response)
    except httpx.HTTPError as error:
        fail(f"{place.url}{path}: {http_reason(error)}")
    except (httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        fail(f"{place.url}{path[:200]}: {error}")
