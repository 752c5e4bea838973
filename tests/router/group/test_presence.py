"""Heartbeats of a router."""

import asyncio
from pathlib import Path

from router.routing.group.presence import Presence


async def test_a_router_that_ends_logs_no_traceback(tmp_path: Path) -> None:
    """The end of the event loop cancels the tasks that still send heartbeats."""
    faults: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: faults.append(context))
    before = asyncio.all_tasks()
    presence = Presence(tmp_path / "router.sock")
    await presence.start()
    reader, writer = await asyncio.open_unix_connection(tmp_path / "router.sock")
    assert await reader.readline()
    talking = asyncio.all_tasks() - before
    assert len(talking) == 1
    for task in talking:
        task.cancel()
    await asyncio.wait(talking)
    await asyncio.sleep(0)  # callbacks of the task
    assert faults == []
    assert await reader.read() == b"", "the connection is closed"
    writer.close()
    presence.close()
