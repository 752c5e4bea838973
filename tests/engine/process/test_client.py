"""The shell's handle on a step-loop process."""

import asyncio

import pytest

from engine.process import messages
from engine.process.client import EngineClient
from engine.settings import EngineSettings


async def test_an_engine_that_loads_long_is_waited_for_as_long_as_it_says_something() -> None:
    client = EngineClient(EngineSettings(model="emulated"), lambda _: None)
    waiting = asyncio.create_task(client._until_ready(0.2))
    for _ in range(6):
        await asyncio.sleep(0.1)
        client._dispatch([messages.Progress("convert weights: 10 %")])
    assert not waiting.done()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waiting, 2.0)
