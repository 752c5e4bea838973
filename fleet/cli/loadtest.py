"""The local fleet as `baton loadtest` uses it."""

import asyncio

import psutil
import typer

from baton.registry.orders import Orders
from baton.registry.redis_store import Registry, RegistryUnavailableError
from fleet.cli.common import known_fleet
from fleet.local.state import FleetState
from loadtest.commands.options import LocalFleet


def give_local_fleet(ctx: typer.Context) -> None:
    """Load-test any OpenAI-compatible server and report its users' latency."""
    ctx.obj = local_fleet


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
        roll=lambda: asyncio.run(_roll(state)),
    )


def _redis_pid(state: FleetState) -> int | None:
    """Return the process id of the embedded Redis; None if the fleet uses an external one."""
    supervisor = state.supervisor.find()
    try:
        children = supervisor.children() if supervisor is not None else []
        return next((c.pid for c in children if c.name().startswith("redis-server")), None)
    except psutil.Error:
        return None


async def _roll(state: FleetState) -> str:
    registry = Registry(state.redis_url, state.fleet)
    try:
        answer = await Orders(registry).ask("roll")
    except RegistryUnavailableError as error:
        return str(error)
    finally:
        await registry.close()
    return "the controller did not respond" if answer is None else answer.problem
