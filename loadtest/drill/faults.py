"""Faults of drills. Each takes the fleet and returns a description of what it did."""

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import psutil

from loadtest.commands.options import LocalFleet
from loadtest.drill import links
from loadtest.drill.fleet import DrillError, FleetView

_FROZEN_S = 20.0
_ROLL_LIMIT_S = 400.0
_TURNS = 3
_TURN_GAP_S = 1.5


class Scene(NamedTuple):
    """Fleet that a fault is injected into."""

    fleet: FleetView
    local: LocalFleet


Fault = Callable[[Scene], Awaitable[str]]


def kill(role: str) -> Fault:
    """Send SIGKILL to the step loop of the busiest worker of a role."""

    async def fault(scene: Scene) -> str:
        victim = await scene.fleet.victim(role)
        os.kill(victim.pid, signal.SIGKILL)
        return f"kill -9 of {victim.id} (pid {victim.pid}, {victim.running} running)"

    return fault


def freeze(role: str) -> Fault:
    """Send SIGSTOP for 20 s, unless the fleet kills the process before."""

    async def fault(scene: Scene) -> str:
        victim = await scene.fleet.victim(role)
        process = psutil.Process(victim.pid)
        process.suspend()
        try:
            async with asyncio.timeout(_FROZEN_S):
                while _runs(process):  # noqa: ASYNC110 - exits of others' children have no event
                    await asyncio.sleep(0.2)
            after = "the fleet killed it"
        except TimeoutError:
            after = f"SIGCONT after {_FROZEN_S:g} s"
        except psutil.Error:
            after = "the fleet killed it"
        finally:
            with contextlib.suppress(psutil.Error):  # psutil detects a reused pid
                process.resume()
        return f"SIGSTOP of {victim.id} (pid {victim.pid}); {after}"

    return fault


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def bad_link(role: str, seconds: float, bytes_per_s: int | None = None) -> Fault:
    """Cut the network of a role's busiest worker for a while, or limit it to a rate."""

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
    """Send SIGKILL to the fleet's own Redis; the supervisor starts another one, empty."""
    pid = scene.local.redis_pid()
    if pid is None:
        raise DrillError("the fleet's Redis is external: this drill would stop other users' Redis")
    os.kill(pid, signal.SIGKILL)
    return f"kill -9 of Redis (pid {pid})"


async def roll(scene: Scene) -> str:
    """Restart the workers one after another; return when all are ready again."""
    before = {worker.id: worker.epoch for worker in await scene.fleet.workers()}
    if problem := await asyncio.to_thread(scene.local.order, "roll", {}):
        raise DrillError(f"rolling restart: {problem}")
    workers = await scene.fleet.wait(
        lambda now: all(w.epoch > before.get(w.id, -1) and w.state == "ready" for w in now),
        _ROLL_LIMIT_S,
    )
    new = [w.id for w in workers if w.epoch > before.get(w.id, -1)]
    return f"rolling restart: restarted {', '.join(sorted(new)) or 'no worker'}"


async def turn(scene: Scene) -> str:
    """Change the role of a worker and change it back, several times."""
    workers = await scene.fleet.workers()
    sizes = Counter(worker.role for worker in workers)
    fewer, more = ("prefill", "decode") if sizes["prefill"] else ("decode", "prefill")
    other = {fewer: sizes[fewer] - 1, more: sizes[more] + 1}
    for wanted in (other, {role: sizes[role] for role in other}) * _TURNS:
        if problem := await asyncio.to_thread(scene.local.order, "scale", wanted):
            raise DrillError(f"change of role: {problem}")
        await asyncio.sleep(_TURN_GAP_S)
    after = await scene.fleet.workers()
    if [worker.epoch for worker in after] != [worker.epoch for worker in workers]:
        raise DrillError("a worker was restarted")
    return f"a {fewer} worker became a {more} worker and back, {_TURNS} times"


async def only_traffic(scene: Scene) -> str:
    """Inject nothing: the load itself is the fault."""
    return "the load itself"
