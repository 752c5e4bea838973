"""The local fleet as `baton loadtest` uses it."""

import asyncio
from collections.abc import Mapping

import psutil

from baton.registry.admin_commands import AdminCommands
from baton.registry.redis_store import Registry, RegistryUnavailableError
from fleet.cli.common import known_fleet
from fleet.local.redis_server import SERVER_PROGRAMS
from fleet.local.state import FleetState
from loadtest.commands.options import LocalFleet

_ANSWER_LIMIT_S = 15.0


def local_fleet() -> LocalFleet | None:
    """Return the running fleet of this machine, if there is exactly one."""
    state = known_fleet(None)
    if state is None or not state.running:
        return None
    return LocalFleet(
        name=state.name,
        url=state.url,
        operator_key=state.fleet_token,
        redis_pid=lambda: _redis_pid(state),
        order=lambda verb, arguments: asyncio.run(_order(state, verb, arguments)),
    )


def _redis_pid(state: FleetState) -> int | None:
    """Return the process id of the embedded Redis; None if the fleet uses an external one."""
    supervisor = state.supervisor.find()
    try:
        children = supervisor.children() if supervisor is not None else []
        return next((c.pid for c in children if c.name() in SERVER_PROGRAMS), None)
    except psutil.Error:
        return None


async def _order(state: FleetState, verb: str, arguments: Mapping[str, int]) -> str:
    registry = Registry(state.redis_url, state.fleet)
    try:
        answer = await AdminCommands(registry).ask(
            verb, arguments=arguments, timeout_s=_ANSWER_LIMIT_S
        )
    except RegistryUnavailableError as error:
        return str(error)
    finally:
        await registry.close()
    return "the controller did not respond" if answer is None else answer.problem
