"""Commands to the controller of a running fleet: `baton drain` and `baton restart`."""

import asyncio
from typing import Annotated

import typer

from fleet.cli.common import FleetOption, fail, running_fleet
from registry.redis_store import Registry, RegistryUnavailableError


def drain(
    worker: Annotated[str, typer.Argument(help="Such as decode-0.")], fleet: FleetOption = None
) -> None:
    """Take one worker out of traffic and stop it once its requests have ended.

    `baton restart WORKER` brings it back.
    """
    _order(fleet, "drain", [worker])
    typer.echo(f"{worker}: draining (`baton status`)")


def restart(
    worker: Annotated[str | None, typer.Argument(help="Such as decode-0; all if absent.")] = None,
    fleet: FleetOption = None,
    rolling: Annotated[
        bool, typer.Option("--rolling", help="One after another, each drained first.")
    ] = False,
) -> None:
    """Give workers a new life: at once, or one after another without losing a request."""
    _order(fleet, "roll" if rolling else "restart", [worker] if worker else [])
    typer.echo(f"{worker or 'all workers'}: restarting{' one by one' if rolling else ''}")


def _order(fleet: str | None, verb: str, workers: list[str]) -> None:
    """Ask the controller, through Redis."""
    state = running_fleet(fleet)

    async def ask() -> str | None:
        registry = Registry(state.redis_url, state.fleet)
        try:
            return await registry.ask(verb, workers)
        finally:
            await registry.close()

    try:
        answer = asyncio.run(ask())
    except RegistryUnavailableError as error:
        fail(f"{error}: the controller cannot be reached now")
    if answer is None:
        fail("the controller did not answer; see `baton logs controller`")
    if answer:
        fail(answer)
