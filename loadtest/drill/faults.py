"""Faults of drills. Each takes the fleet and returns a description of what it did."""

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from subprocess import PIPE
from typing import Any, NamedTuple

import psutil

from loadtest.commands.options import LocalFleet
from loadtest.drill.fleet import DrillError, DrillFaultError, FleetView
from loadtest.percent import percent

_FROZEN_S = 20.0
_ROLL_LIMIT_S = 400.0
_TURNS = 3
_TURN_GAP_S = 1.5
_DAMAGED_SUFFIX = "-damaged"
_CANARY_SHARE = 0.5
_CANARY_TRAFFIC_S = 3.0
_ROLLBACK_LIMIT_S = 10.0
_ROLLBACK_LIMIT_REQUESTS = 20
_POLL_S = 0.05
_GOLDEN_PROMPTS = (
    "Once upon a time, there was",
    "The capital of France is",
    "One, two, three, four,",
)
_NFT_SCRIPT = 'nft -f - <<< "$1" && echo ready && { cat >/dev/null; nft delete table inet "$2"; }'


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
        body = cut(port) if bytes_per_s is None else slow(port, bytes_per_s)
        async with rules(body):
            await asyncio.sleep(seconds)
        how = "cut" if bytes_per_s is None else f"at {bytes_per_s} B/s"
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


async def bad_canary(fleet: FleetView) -> str:
    """Canary the damaged copy twice; return what happened.

    The fleet serves the model NAME and its damaged copy NAME-damaged (`loadtest.drill.damage`).
    First the copy has golden prompts and must be refused. Then it answers half of the
    conversations, gets its golden prompts, and must be rolled back within 20 of its requests or
    10 s.

    Raises:
        DrillError: The fleet has no damaged copy of a model.
        DrillFaultError: The copy got requests, or was not rolled back in time.
    """
    name = await model_with_copy(fleet)
    copy = f"{name}{_DAMAGED_SUFFIX}"
    try:
        return await _drill(fleet, name, copy)
    finally:
        await fleet.change_models({"verb": "remove", "name": name})
        await fleet.change_models({"verb": "gate", "name": copy, "golden": []})


async def model_with_copy(fleet: FleetView) -> str:
    """Return the name of a model that has a damaged copy.

    Raises:
        DrillError: There is none.
    """
    models: list[str] = [model["name"] for model in (await fleet.models())["models"]]
    pairs = [name for name in models if f"{name}{_DAMAGED_SUFFIX}" in models]
    if not pairs:
        raise DrillError(
            f"the fleet serves no model NAME with a damaged copy NAME{_DAMAGED_SUFFIX}: "
            "see `python -m loadtest.drill.damage --help`"
        )
    return pairs[0]


async def _drill(fleet: FleetView, name: str, copy: str) -> str:
    canary: dict[str, Any] = {"verb": "canary", "name": name, "model": copy, "share": _CANARY_SHARE}
    golden = [
        {"name": f"prompt {index}", "prompt": text, "same_as": name}
        for index, text in enumerate(_GOLDEN_PROMPTS)
    ]
    gate = {"verb": "gate", "name": copy}
    await fleet.change_models({**gate, "golden": golden})
    if not await fleet.change_models(canary):
        raise DrillFaultError(f"{copy} became a canary in spite of its golden prompts")
    await fleet.change_models({**gate, "golden": []})
    if problem := await fleet.change_models(canary):
        raise DrillError(f"canary without golden prompts: {problem}")
    await asyncio.sleep(_CANARY_TRAFFIC_S)
    before = _requests(await fleet.models(), name)
    began_s = time.monotonic()
    await fleet.change_models({**gate, "golden": golden})
    after = before
    while True:
        state = await fleet.models()
        took_s = time.monotonic() - began_s
        entry = state["routes"].get(name, {})
        if entry.get("thrown_out"):
            break
        after = _requests(state, name)
        if took_s > _ROLLBACK_LIMIT_S and after - before > _ROLLBACK_LIMIT_REQUESTS:
            raise DrillFaultError(f"{copy} is still a canary after {took_s:.1f} s")
        await asyncio.sleep(_POLL_S)
    return (
        f"{copy} was refused before traffic; with {percent(_CANARY_SHARE, 0)} of the traffic it "
        f"was rolled back after {took_s:.1f} s and {after - before} of its requests: "
        f"{entry['reason']}"
    )


def _requests(state: dict[str, Any], name: str) -> int:
    gate = state["routes"].get(name, {}).get("gate")
    return int(gate["canary"]["requests"]) if gate else 0


def missing_requirement() -> str:
    """Return why rules cannot be set here, or "" if they can."""
    if shutil.which("nft") is None:
        return "needs nft (Debian's package nftables)"
    return "" if os.geteuid() == 0 else "needs root, as nftables rules do"


def cut(port: int) -> str:
    """Return rules that drop everything to and from a TCP port."""
    return f"tcp dport {port} drop; tcp sport {port} drop"


def slow(port: int, bytes_per_s: int) -> str:
    """Return rules that drop what a port sends above a rate.

    The kernel's bucket holds one second's bytes plus the burst, which pass at once.
    """
    burst_bytes = max(bytes_per_s // 4, 65_536)
    limit = f"limit rate over {bytes_per_s} bytes/second burst {burst_bytes} bytes"
    return f"tcp sport {port} {limit} drop"


@contextlib.asynccontextmanager
async def rules(body: str) -> AsyncIterator[None]:
    """Apply nftables rules from `cut` or `slow` to arriving packets on all interfaces.

    They are in a table of their own. A shell adds them, and removes them when its standard input
    closes, so that they disappear with this process even if it is killed.
    """
    if problem := missing_requirement():
        raise DrillError(problem)
    name = f"baton_drill_{os.getpid()}"
    chain = f"chain in {{ type filter hook input priority 0; {body}; }};"
    table = f"table inet {name} {{ {chain} }}"
    shell = await asyncio.create_subprocess_exec(
        "bash", "-c", _NFT_SCRIPT, "drill", table, name, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    assert shell.stdin is not None and shell.stdout is not None and shell.stderr is not None
    try:
        if (await shell.stdout.readline()).strip() != b"ready":
            output = (await shell.stderr.read()).decode(errors="replace").strip()
            raise DrillError(f"nftables: {output}")
        yield
    finally:
        shell.stdin.close()
        await shell.wait()
