"""Client process: receives its job on standard input and writes records to standard output.

    in    the length of the job (8 bytes), the job (MessagePack), later a line with ZERO_S
    out   a JSON line for each message: Ready, RequestRecord …, ClientReport

It exits when standard input closes, so a client without its parent sends nothing more.
"""

import asyncio
import sys

import msgspec
import uvloop

from loadtest.client.records import ClientJob, ClientReady, Message
from loadtest.client.runner import PlanRunner


def _write(message: Message) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


async def _run() -> None:
    loop = asyncio.get_running_loop()
    source = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(source), sys.stdin)
    size = int.from_bytes(await source.readexactly(8))
    job = msgspec.msgpack.decode(await source.readexactly(size), type=ClientJob)
    runner = PlanRunner(job, _write)
    _write(ClientReady())
    zero_s = float(await source.readline())
    async with asyncio.TaskGroup() as group:
        running = group.create_task(runner.run(zero_s))
        parent = group.create_task(source.read())
        await asyncio.wait((running, parent), return_when=asyncio.FIRST_COMPLETED)
        parent.cancel()
        if not running.done():
            running.cancel()
    if not running.cancelled():
        _write(running.result())


if __name__ == "__main__":
    uvloop.run(_run())
