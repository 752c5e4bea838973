"""The shell's handle on a step-loop process."""

import asyncio
import subprocess
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import psutil
import pytest

from engine.core.errors import InternalError
from engine.core.geometry import KvGeometry
from engine.process import client as module
from engine.process import messages
from engine.process.client import EngineClient, ReportInbox
from engine.process.handle import EngineHandle
from engine.settings import EngineSettings


async def test_an_engine_that_loads_long_is_waited_for_as_long_as_it_says_something() -> None:
    inbox = ReportInbox()
    waiting = asyncio.create_task(inbox.until_ready(1.0))
    for _ in range(6):
        await asyncio.sleep(0.25)
        inbox.dispatch([messages.Progress("convert weights: 10 %")])
    assert not waiting.done()
    with pytest.raises(InternalError, match="said nothing"):
        await asyncio.wait_for(waiting, 10.0)


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


async def test_whoever_gives_up_on_an_engine_that_loads_leaves_no_process_behind() -> None:
    before = children()
    starting = asyncio.create_task(EngineClient.start(EngineSettings(model="emulated")))
    while not children() - before:
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert children() == before


async def test_an_engine_that_cannot_load_says_why() -> None:
    with pytest.raises(InternalError):
        await EngineClient.start(EngineSettings(model="/nowhere"), stderr=subprocess.DEVNULL)


async def test_what_an_engine_said_last_is_heard_before_its_end(monkeypatch) -> None:
    """Suspicion e: a process may be reaped before its last bytes are read."""
    reader = asyncio.StreamReader()
    process = SimpleNamespace(pid=1, returncode=1, wait=AsyncMock(return_value=1))

    async def spawn(*_: object) -> tuple[object, object]:
        return process, Mock()

    async def connect(**_: object) -> tuple[object, object]:
        return reader, Mock()

    def feed_last() -> None:
        reader.feed_data(messages.frame([messages.Fatal("out of memory")]))
        reader.feed_eof()

    monkeypatch.setattr(module, "_spawn", spawn)
    monkeypatch.setattr(module.asyncio, "open_connection", connect)
    asyncio.get_running_loop().call_later(0.05, feed_last)
    with pytest.raises(InternalError, match="out of memory"):
        await EngineClient.start(EngineSettings(model="emulated"), timeout_s=5)


def handle_of(client: object) -> EngineHandle:
    geometry = KvGeometry(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=8, dtype="bf16")
    client.ready = SimpleNamespace(geometry=geometry)
    return EngineHandle(client)


def test_a_step_loop_that_says_nothing_is_silent_until_it_speaks() -> None:
    """Defect 23."""
    handle = handle_of(Mock())
    began_ns = handle._heard_ns
    ticks = [began_ns + number * 250_000_000 for number in range(20)]
    silent = []
    for now_ns in ticks:
        handle.watch(now_ns)
        silent.append(handle.silent)
    assert silent.index(True) == 13, "just after 3 s"
    handle._on_report(messages.Alive())
    assert not handle.silent


def test_a_shell_that_stood_still_itself_does_not_blame_its_engine() -> None:
    """Defect 23: reports of that time are still to be read."""
    handle = handle_of(Mock())
    now_ns = handle._heard_ns + 10_000_000_000
    handle.watch(now_ns)
    handle.watch(now_ns + 250_000_000)
    assert not handle.silent
