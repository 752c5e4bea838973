"""How faults are done. Each takes the fleet, and says what it did."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import psutil

from loadtest.commands.options import LocalFleet
from loadtest.drill import links
from loadtest.drill.fleet import DrillError, FleetView

_FROZEN_S = 20.0
_ROLL_LIMIT_S = 400.0


class Scene(NamedTuple):
    """What a fault may touch."""

    fleet: FleetView
    local: LocalFleet


Fault = Callable[[Scene], Awaitable[str]]


def kill(role: str) -> Fault:
    """SIGKILL to the step loop of the busiest worker of a role."""

    async def fault(scene: Scene) -> str:
        victim = await scene.fleet.victim(role)
        os.kill(victim.pid, signal.SIGKILL)
        return f"kill -9 of {victim.id} (pid {victim.pid}, {victim.running} running)"

    return fault


def freeze(role: str) -> Fault:
    """SIGSTOP for 20 s, unless the fleet ends the process before."""

    async def fault(scene: Scene) -> str:
        victim = await scene.fleet.victim(role)
        process = psutil.Process(victim.pid)
        process.suspend()
        try:
            async with asyncio.timeout(_FROZEN_S):
                while _runs(process):  # noqa: ASYNC110 - nobody tells of another's child
                    await asyncio.sleep(0.2)
            after = "the fleet ended it"
        except TimeoutError:
            after = f"SIGCONT after {_FROZEN_S:g} s"
        except psutil.Error:
            after = "the fleet ended it"
        finally:
            with contextlib.suppress(psutil.Error):  # is_running() knows a pid that was reused
                process.resume()
        return f"SIGSTOP of {victim.id} (pid {victim.pid}); {after}"

    return fault


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def bad_link(role: str, seconds: float, bytes_per_s: int | None = None) -> Fault:
    """All of a worker's network is cut, or slow, for a while; then it heals.

    Args:
        role: Whose worker: the busiest of them.
        seconds: For how long.
        bytes_per_s: What it lets through; None: nothing.
    """

    async def fault(scene: Scene) -> str:
        victim = await scene.fleet.victim(role)
        port = int(victim.address.rpartition(":")[2])
        cut = bytes_per_s is None
        body = links.cut(port) if bytes_per_s is None else links.slow(port, bytes_per_s)
        async with links.rules(body):
            await asyncio.sleep(seconds)
        how = "cut" if cut else f"at {bytes_per_s} B/s"
        return f"port {port} of {victim.id} {how} for {seconds:g} s"

    return fault


async def kill_redis(scene: Scene) -> str:
    """SIGKILL to the fleet's own Redis; the supervisor starts another one, empty."""
    pid = scene.local.redis_pid()
    if pid is None:
        raise DrillError("the fleet's Redis is not its own: this drill would stop another's")
    os.kill(pid, signal.SIGKILL)
    return f"kill -9 of Redis (pid {pid})"


async def roll(scene: Scene) -> str:
    """A rolling restart: each worker drained, then begun anew; returns when all have been."""
    before = {worker.id: worker.epoch for worker in await scene.fleet.workers()}
    if problem := await asyncio.to_thread(scene.local.roll):
        raise DrillError(f"rolling restart: {problem}")
    workers = await scene.fleet.wait(
        lambda now: all(w.epoch > before.get(w.id, -1) and w.state == "ready" for w in now),
        _ROLL_LIMIT_S,
    )
    new = [w.id for w in workers if w.epoch > before.get(w.id, -1)]
    return f"rolling restart: new lives of {', '.join(sorted(new)) or 'nobody'}"


async def only_traffic(scene: Scene) -> str:
    """The load itself is the fault."""
    return "the load itself"
