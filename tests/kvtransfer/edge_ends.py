"""Both ends of an edge for tests of transports: a pool of noise that is served, and who pulls.

As a process of its own, to be killed or stopped: ``python -m tests.kvtransfer.edge_ends send`` and
``... read``, with what they need to know as one line of JSON on standard input.
"""

import asyncio
import contextlib
import fcntl
import json
import mmap
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial

import grpc.aio
import numpy as np
from batonpb import common_pb2
from batonpb import prefill_pb2 as pb
from batonpb.decode_pb2 import PrefillTarget
from google.protobuf import json_format

from baton.types.events import Published
from baton.types.geometry import KvGeometry
from baton.wire.compatibility import kv_group
from baton.wire.fleet_token import FleetToken, TokenInterceptor
from baton.wire.grpc_channels import Channels
from baton.wire.grpc_options import WORKER_OPTIONS
from kvtransfer import chunk, sender
from kvtransfer.kv_slice import KvSlice, cut
from kvtransfer.pool_source import HeldKv, Key, PoolSource
from kvtransfer.transport import Frame, Peer, ServingSide, Transport
from kvtransfer.transports import TRANSPORTS, servers
from tests.kvtransfer.damaged_frames import DamagingSource

TOKEN = "token"
KEY = ("request", 1, 7)
READER = b"r" * 16
TOKENS = 200
LEASE_NS = 3_000_000_000
GEOMETRY = KvGeometry(num_layers=4, num_kv_heads=2, head_dim=16, num_blocks=64, dtype="bf16")
# a run, pages on their own, and a run backwards
BLOCKS = (10, 11, 12, 13, 3, 50, 7, 40, 39, 38, 20, 21, 22)
OURS = (30, 31, 32, 33, 34, 35, 9, 8, 7, 50, 51, 52, 53)


def slices() -> list[KvSlice]:
    """All of the prompt, in pieces of two layers and some blocks."""
    whole = [
        KvSlice(layer, 2, 0, GEOMETRY.num_kv_heads, 0, len(BLOCKS), TOKENS) for layer in (0, 2)
    ]
    return [piece for band in whole for piece in cut(band, GEOMETRY, frame_bytes=(64 + 16) << 10)]


def pull_request(
    kv_slices: list[KvSlice],
    incarnation: bytes,
    generation: int = KEY[2],
    encoding: common_pb2.ChunkEncoding = common_pb2.PLAIN,
) -> pb.PullRequest:
    return pb.PullRequest(
        request_id=KEY[0],
        attempt=KEY[1],
        reader_incarnation=READER,
        generation=generation,
        source_incarnation=incarnation,
        kv_slices=[kv_slice.to_wire() for kv_slice in kv_slices],
        encoding=encoding,
    )


class SendingEnd:
    """A pool of noise in which one hand-off lies, complete."""

    def __init__(self, fault: str = "", encodings: Sequence[common_pb2.ChunkEncoding] = ()) -> None:
        self.incarnation = secrets.token_bytes(16)
        file = os.memfd_create("test-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, GEOMETRY.pool_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.memory = memoryview(mmap.mmap(file, GEOMETRY.pool_bytes))
        self.scribble(1)
        self.pool_fd = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
        os.close(file)
        self.view = chunk.PoolView(self.memory, GEOMETRY)
        self.machine = sender.HandoffSender(GEOMETRY, TOKENS, 0, LEASE_NS, 0)
        self.machine.admitted(BLOCKS)
        for layer in (0, 2):
            event = Published(
                request_id="request",
                layer_begin=layer,
                layer_count=2,
                block_begin=0,
                block_count=len(BLOCKS),
                valid_tokens=TOKENS,
            )
            self.machine.published(event)
        self.given_back: list[sender.GiveBack] = []
        made = partial(DamagingSource, fault) if fault else PoolSource
        self.source = made(self.view, self.incarnation, self._find, encodings=encodings)

    def scribble(self, seed: int) -> None:
        """What other requests do with pages that were given back."""
        noise = np.random.default_rng(seed).bytes(GEOMETRY.pool_bytes)
        self.memory[:] = noise

    def perform(self, actions: list[sender.Action]) -> None:
        self.given_back += [a for a in actions if isinstance(a, sender.GiveBack)]

    def _find(self, key: Key) -> HeldKv | None:
        return HeldKv(self.machine, self.perform) if key == (*KEY, READER) else None

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[Peer]:
        """By every transport, while the block runs."""
        token = FleetToken(TOKEN)
        server = grpc.aio.server(interceptors=[TokenInterceptor(token)], options=WORKER_OPTIONS)
        port = server.add_insecure_port("127.0.0.1:0")
        listener = socket.create_server(("127.0.0.1", 0))
        side = ServingSide(server, token, self.incarnation, self.pool_fd, listener)
        ways = servers(side, tuple(TRANSPORTS))
        for way in ways:
            await way.start(self.source)
        await server.start()
        target = PrefillTarget(
            worker_id="prefill-0", incarnation=self.incarnation, address=f"127.0.0.1:{port}"
        )
        capabilities = common_pb2.Capabilities(
            kv_groups=[kv_group(GEOMETRY)],
            transports=[way.offer for way in ways if way.offer is not None],
        )
        try:
            yield Peer(target, capabilities)
        finally:
            for way in ways:
                await way.close()
            await server.stop(None)
            os.close(self.pool_fd)


class ReadingEnd:
    """A pool of zeros, and one transport."""

    encoding = common_pb2.PLAIN  # that it asks for

    def __init__(self, name: str, token: str = TOKEN) -> None:
        self.channels = Channels()
        self.transport: Transport = TRANSPORTS[name].connect(self.channels, FleetToken(token))
        self.view = chunk.PoolView(bytearray(GEOMETRY.pool_bytes), GEOMETRY)

    async def read(self, peer: Peer, kv_slices: list[KvSlice]) -> list[Frame]:
        """The frames of one pull, not stored; the pull stays open."""
        request = pull_request(kv_slices, peer.target.incarnation, encoding=self.encoding)
        pull = self.transport.pull(peer, request)
        frames: list[Frame] = []
        while came := await pull.read():
            frames += came
        self.pull = pull
        return frames

    def store(self, peer: Peer, frame: Frame, kv_slice: KvSlice) -> None:
        frame.store(self.view, OURS, kv_slice, chunk.binding(*KEY, peer.target.incarnation))

    async def fetch(self, peer: Peer, kv_slices: list[KvSlice]) -> list[Exception | None]:
        """Pull and store; what became of each."""
        faults: list[Exception | None] = []
        for frame, kv_slice in zip(await self.read(peer, kv_slices), kv_slices, strict=True):
            try:
                self.store(peer, frame, kv_slice)
            except (chunk.ChunkError, chunk.GoneError) as fault:
                faults.append(fault)
            else:
                faults.append(None)
        self.pull.close()
        return faults

    async def close(self) -> None:
        await self.transport.close()
        await self.channels.close()


@contextlib.asynccontextmanager
async def reading_end(name: str, token: str = TOKEN) -> AsyncIterator[ReadingEnd]:
    end = ReadingEnd(name, token)
    try:
        yield end
    finally:
        await end.close()


class EndProcess:
    """One end in a process of its own; ``answer`` is the line that it says when it is ready."""

    def __init__(self, process: asyncio.subprocess.Process, answer: dict) -> None:
        self.process = process
        self.answer = answer

    @property
    def peer(self) -> Peer:
        capabilities = json_format.Parse(self.answer["capabilities"], common_pb2.Capabilities())
        return Peer(json_format.Parse(self.answer["target"], PrefillTarget()), capabilities)


@contextlib.asynccontextmanager
async def end_process(role: str, **knows: str) -> AsyncIterator[EndProcess]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.kvtransfer.edge_ends", role),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        process.stdin.write(json.dumps(knows).encode() + b"\n")
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        yield EndProcess(process, json.loads(line))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def told(peer: Peer) -> dict[str, str]:
    """A peer, in words for another process."""
    return {
        "target": json_format.MessageToJson(peer.target),
        "capabilities": json_format.MessageToJson(peer.capabilities),
    }


async def send() -> None:
    async with SendingEnd().served() as peer:
        print(json.dumps(told(peer)), flush=True)
        await asyncio.sleep(600)


async def read(knows: dict[str, str]) -> None:
    """Pull everything, and never let go."""
    peer = EndProcess(None, knows).peer
    async with reading_end(knows["transport"]) as end:
        frames = await end.read(peer, slices())
        print(json.dumps({"frames": len(frames)}), flush=True)
        await asyncio.sleep(600)


if __name__ == "__main__":
    told_line = json.loads(sys.stdin.readline())
    asyncio.run(send() if sys.argv[1] == "send" else read(told_line))
