"""Who may speak to a rank that waits for its leader's engine."""

import asyncio
import random
import socket
import struct

import msgspec

from engine.cpu.parallel.rank_sockets import Hello
from fleet.rank import _accept

SECRET = "s3cret"


def hello(secret: str, store: str) -> bytes:
    body = msgspec.msgpack.encode(Hello(secret, store))
    return struct.pack("<I", len(body)) + body


async def test_strangers_neither_end_a_rank_nor_keep_its_leader_waiting() -> None:
    """One letter that is not ASCII ended it, and twelve silent connections kept the leader out."""
    server = socket.create_server(("127.0.0.1", 0))
    server.setblocking(False)
    accepting = asyncio.create_task(_accept(server, SECRET))
    noise = random.Random(1)
    texts = [hello("é", "x"), hello("wrong", "x"), b"\xff" * 40, noise.randbytes(200), b""]
    strangers = []
    for text in [*texts, *[b""] * 12]:
        stranger = socket.create_connection(server.getsockname())
        stranger.sendall(text)
        strangers.append(stranger)
        await asyncio.sleep(0)
    leader = [socket.create_connection(server.getsockname()) for _ in range(2)]
    leader[1].sendall(hello(SECRET, "second"))  # overtakes the first
    await asyncio.sleep(0.1)
    leader[0].sendall(hello(SECRET, "first"))
    async with asyncio.timeout(4):  # less than a stranger's time
        accepted = await accepting
    assert [store for _, store in accepted] == ["first", "second"]
    for link in (*strangers, *leader, *(link for link, _ in accepted), server):
        link.close()
