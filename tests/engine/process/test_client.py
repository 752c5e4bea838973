"""The shell's handle on a step-loop process."""

import asyncio
import subprocess

import psutil
import pytest

from engine.core.errors import InternalError
from engine.process import messages
from engine.process.client import EngineClient, ReportInbox
from engine.settings import EngineSettings


async def test_an_engine_that_loads_long_is_waited_for_as_long_as_it_says_something() -> None:
    inbox = ReportInbox()
    waiting = asyncio.create_task(inbox.until_ready(0.2))
    for _ in range(6):
        await asyncio.sleep(0.1)
        inbox.dispatch([messages.Progress("convert weights: 10 %")])
    assert not waiting.done()
    with pytest.raises(InternalError, match="said nothing"):
        await asyncio.wait_for(waiting, 2.0)


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
