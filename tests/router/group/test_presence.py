"""Heartbeats of a router."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from router.frontend.group.presence import BEAT_S, RouterPresence


def cancel(_: RouterPresence, talking: asyncio.Task[None]) -> None:
    talking.cancel()  # as the end of the event loop does


def close(presence: RouterPresence, _: asyncio.Task[None]) -> None:
    presence.close()


@pytest.mark.parametrize("end", [cancel, close])
def test_a_router_that_ends_logs_no_traceback(
    end: Callable[[RouterPresence, asyncio.Task[None]], None], tmp_path: Path
) -> None:
    """On the event loop of a router, which raises an error for a write to a closed connection."""

    async def life() -> list[dict[str, object]]:
        faults: list[dict[str, object]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: faults.append(context))
        before = asyncio.all_tasks()
        presence = RouterPresence(tmp_path / "router.sock")
        await presence.start()
        reader, writer = await asyncio.open_unix_connection(tmp_path / "router.sock")
        assert await reader.readline()
        (talking,) = asyncio.all_tasks() - before
        end(presence, talking)
        await asyncio.wait([talking], timeout=4 * BEAT_S)
        assert talking.done()
        await asyncio.sleep(0)  # callbacks of the task
        assert await reader.read() == b"", "the connection is closed"
        writer.close()
        presence.close()
        return faults

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(life()) == []
