"""A client process: an order comes in on standard input, records go out on standard output.

    in    the length of the order (8 bytes), the order (MessagePack), later a line with ZERO_S
    out   a JSON line for each message: Ready, RequestRecord …, ClientReport

It ends when standard input does: a client whose parent is gone sends nothing more.
"""

import asyncio
import sys

import msgspec
import uvloop

from loadtest.client.records import ClientOrder, Message, Ready
from loadtest.client.runner import PlanRunner


def _say(message: Message) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


async def _run() -> None:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    size = int.from_bytes(await orders.readexactly(8))
    order = msgspec.msgpack.decode(await orders.readexactly(size), type=ClientOrder)
    runner = PlanRunner(order, _say)
    _say(Ready())
    zero_s = float(await orders.readline())
    async with asyncio.TaskGroup() as group:
        running = group.create_task(runner.run(zero_s))
        parent = group.create_task(orders.read())
        await asyncio.wait((running, parent), return_when=asyncio.FIRST_COMPLETED)
        parent.cancel()
        if not running.done():
            running.cancel()
    if not running.cancelled():
        _say(running.result())


if __name__ == "__main__":
    uvloop.run(_run())
