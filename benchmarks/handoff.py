"""Rate of a KV transfer by each transport, beside the bare primitive below it.

    python -m benchmarks.handoff [--rounds 7] [--tokens 1024] [--scattered]

A separate sender process holds one prompt's KV (shapes of an 8B model: 32 layers, 8 KV heads of
128, bf16). This process pulls all of it, verified, into its pages, with a decode worker's state
machine, puller and transport. Figures are payload bytes per second, median of the rounds. Each
round measures everything once, the primitives too, so that a busy moment affects all alike:

memcpy       one thread, as many bytes from one memory file to another: pools are such files
grpc.aio     a byte stream of 1 MiB messages between the same two processes, thrown away
gloo         send and recv of 1 MiB messages between two processes that do nothing else
"""

import argparse
import asyncio
import contextlib
import ctypes
import fcntl
import json
import mmap
import os
import secrets
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import numpy as np
from batonpb import common_pb2
from batonpb import prefill_pb2 as pb
from batonpb.common_pb2 import PLAIN, ChunkEncoding
from batonpb.decode_pb2 import PrefillTarget, Submission
from google.protobuf import json_format

from baton.telemetry.process_memory import keep_message_memory
from baton.types.events import Published
from baton.types.geometry import BLOCK_TOKENS, KvGeometry
from baton.wire.compatibility import kv_group
from baton.wire.fleet_token import FleetToken
from baton.wire.grpc_channels import Channels
from baton.wire.grpc_options import WORKER_OPTIONS
from decode_worker.frame_puller import FramePuller
from decode_worker.pacing import ReceivePacer
from decode_worker.parts import WorkerParts
from kvtransfer import lent_pages, receiver_actions
from kvtransfer.chunk import PoolView
from kvtransfer.edge import Edge
from kvtransfer.kv_slice import KvSlice, cut
from kvtransfer.native import library
from kvtransfer.pool_source import HeldKv, PoolSource
from kvtransfer.rank_pools import RankPools
from kvtransfer.receiver import HandoffReceiver
from kvtransfer.sender import HandoffSender
from kvtransfer.transport import FrameStream, Peer, ServingSide, Transport, TransportError
from kvtransfer.transports import TRANSPORTS, connect_all, servers

CHUNK_TOKENS = 512
MESSAGE_BYTES = 1 << 20
TOKEN = "bench"
BARE = "/baton.bench.Bare/Stream"
FAR_NS = 1 << 62
_ATTEMPTS = 3


def geometry(tokens: int) -> KvGeometry:
    """Return the geometry of a pool with room for the prompt, twice."""
    blocks = 2 * tokens // BLOCK_TOKENS
    return KvGeometry(num_layers=32, num_kv_heads=8, head_dim=128, num_blocks=blocks, dtype="bf16")


def page_table(tokens: int, scattered: bool) -> tuple[int, ...]:
    """Return pages of the prompt: consecutive, or scattered over the pool."""
    blocks = tokens // BLOCK_TOKENS
    if not scattered:
        return tuple(range(blocks))
    return tuple(int(p) for p in np.random.default_rng(1).permutation(2 * blocks)[:blocks])


class _NoDigest:
    """Replaces a digest, to measure the copy alone; equal on both sides."""

    def update(self, _: object) -> None: ...

    def intdigest(self) -> int:
        return 0


@contextlib.contextmanager
def without_digests() -> Iterator[None]:
    """Accept all frames without verification, in this process."""
    digest = lent_pages.hasher
    native = library.load()
    lent_pages.hasher = lambda *_: _NoDigest()  # type: ignore[assignment]
    if native is not None:
        no_digests = (ctypes.c_void_p * len(library.HASH_FUNCTIONS))()
        native.baton_kv_hash(no_digests)
    try:
        yield
    finally:
        lent_pages.hasher = digest
        if native is not None:
            native.baton_kv_hash(library.hash_functions())


# -------------------------------------------------------------------- the sender's process


async def send(tokens: int, scattered: bool) -> None:
    """Hold a prompt's KV and serve it until standard input closes."""
    shape = geometry(tokens)
    pool_fd, memory = memory_file(shape.pool_bytes)
    machine = HandoffSender(shape, tokens, 0, FAR_NS, 0)
    machine.admitted(page_table(tokens, scattered))
    for kv_slice in rectangles(shape, tokens):
        event = Published(
            request_id="r",
            layer_begin=kv_slice.layer_begin,
            layer_count=kv_slice.layer_count,
            block_begin=kv_slice.block_begin,
            block_count=kv_slice.block_count,
            valid_tokens=kv_slice.valid_tokens,
        )
        machine.published(event)
    incarnation = secrets.token_bytes(16)
    held = HeldKv(machine, lambda _: None)
    source = PoolSource(RankPools([memory], shape), incarnation, lambda _: held)
    server = grpc.aio.server(options=WORKER_OPTIONS)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.add_generic_rpc_handlers((_bare_handler(),))
    listener = socket.create_server(("127.0.0.1", 0))
    side = ServingSide(server, FleetToken(TOKEN), incarnation, pool_fd, listener)
    sides = servers(side, tuple(TRANSPORTS))
    for way in sides:
        await way.start(source)
    await server.start()
    target = PrefillTarget(worker_id="prefill-0", incarnation=incarnation, address=address)
    offers = [way.offer for way in sides if way.offer is not None]
    capabilities = common_pb2.Capabilities(kv_groups=[kv_group(shape)], transports=offers)
    print(json.dumps([json_format.MessageToJson(m) for m in (target, capabilities)]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for way in sides:
        await way.close()
    await server.stop(None)


def memory_file(size_bytes: int) -> tuple[int, memoryview]:
    """Return the descriptor of a memory file, and the file mapped and filled."""
    file = os.memfd_create("bench-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size_bytes)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    memory = memoryview(mmap.mmap(file, size_bytes))
    np.frombuffer(memory, np.uint64)[:] = np.arange(size_bytes // 8, dtype=np.uint64)
    return file, memory


def rectangles(shape: KvGeometry, tokens: int) -> list[KvSlice]:
    """Return the prompt's rectangles in prefill's order: layer by layer of each chunk."""
    blocks = CHUNK_TOKENS // BLOCK_TOKENS
    return [
        KvSlice(layer, 1, 0, shape.num_kv_heads, chunk * blocks, blocks, CHUNK_TOKENS)
        for chunk in range(tokens // CHUNK_TOKENS)
        for layer in range(shape.num_layers)
    ]


def _bare_handler() -> Any:
    message = bytes(MESSAGE_BYTES)

    async def stream(request: bytes, _: Any) -> AsyncIterator[bytes]:
        for _ in range(int(request)):
            yield message

    service, method = BARE.strip("/").split("/")
    rpc: grpc.RpcMethodHandler[Any, Any] = grpc.unary_stream_rpc_method_handler(stream)
    return grpc.method_handlers_generic_handler(service, {method: rpc})


# -------------------------------------------------------------------- the reader


class _OnePeer:
    """Replaces a worker's ``Peers`` by one prefill worker, and one transport to it."""

    def __init__(self, transport: Transport, way: str, peer: Peer) -> None:
        self._transport = transport
        self._way = way
        self._peer = peer
        self._edge = Edge()

    def ways(self, target: PrefillTarget, now_ns: int) -> list[str]:
        return [self._way]

    def address(self, target: PrefillTarget, kv_slice: KvSlice) -> str:
        return target.address

    def encoding(
        self, target: PrefillTarget, way: str, plain_bytes: int, int8_bytes: int
    ) -> ChunkEncoding:
        return PLAIN

    def edge(self, worker_id: str) -> Edge:
        return self._edge

    def pull(self, target: PrefillTarget, request: pb.PullRequest, way: str) -> FrameStream:
        return self._transport.pull(self._peer, request)


def _parts_of_puller(peer: _OnePeer, pool: PoolView) -> SimpleNamespace:
    return SimpleNamespace(
        pool=pool,
        peers=peer,
        pacer=ReceivePacer(0.0),
        metrics=SimpleNamespace(inc=_ignore, observe=_ignore),
        identity=SimpleNamespace(incarnation=b""),
    )


async def hand_off(transport: Transport, way: str, peer: Peer, pool: PoolView, tokens: int) -> None:
    """Pull a prompt's KV, from the first request to the last verified byte."""
    machine = HandoffReceiver(pool.geometry, tokens, frame_bytes=transport.frame_bytes)
    parts = _parts_of_puller(_OnePeer(transport, way, peer), pool)
    wanted = rectangles(pool.geometry, tokens)
    total_bytes = sum(kv_slice.payload_bytes(pool.geometry) for kv_slice in wanted)
    async with asyncio.TaskGroup() as pulls:

        def perform(actions: list[receiver_actions.Action]) -> None:
            for action in actions:
                match action:
                    case receiver_actions.Pull():
                        pulls.create_task(puller.pull(action, peer.target, 1))
                    case receiver_actions.AskForPeer():
                        raise RuntimeError(action.reason)

        submission = Submission(request_id="r", attempt=1)
        puller = FramePuller(submission, machine, cast(WorkerParts, parts), perform)
        machine.reserved(1, 0, 0)
        machine.accepted(resumed=False, now_ns=0)
        for kv_slice in wanted:
            machine.published(kv_slice, 0)
        perform(machine.bound(1, tuple(range(tokens // BLOCK_TOKENS))))
    if machine.payload_bytes != total_bytes or machine.repairs:
        raise RuntimeError(f"got {machine.payload_bytes} of {total_bytes} bytes")


async def connects(transport: Transport, peer: Peer, kv_slice: KvSlice) -> bool:
    """Return whether a first pull opens the connection; for `pair` that takes seconds."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(TransportError):
            await _pull_once(transport, peer, kv_slice)
            return True
    return False


async def _pull_once(transport: Transport, peer: Peer, kv_slice: KvSlice) -> None:
    incarnation = peer.target.incarnation
    request = pb.PullRequest(
        request_id="r",
        attempt=1,
        generation=1,
        source_incarnation=incarnation,
        kv_slices=[s.to_wire() for s in cut(kv_slice, geometry(BLOCK_TOKENS))],
    )
    pull = transport.pull(peer, request)
    while await pull.read():
        pass
    pull.close()


def _ignore(*_: object, **__: object) -> None: ...


@contextlib.asynccontextmanager
async def sender_process(*options: str) -> AsyncIterator[Peer]:
    """Run ``send`` in a separate process."""
    process = await _python("benchmarks.handoff", "--send", *options)
    target, capabilities = json.loads(await _pipe(process.stdout).readline())
    try:
        yield Peer(
            json_format.Parse(target, PrefillTarget()),
            json_format.Parse(capabilities, common_pb2.Capabilities()),
        )
    finally:
        _pipe(process.stdin).close()
        await process.wait()


class _GlooStream:
    def __init__(self, ends: list[asyncio.subprocess.Process]) -> None:
        self._ends = ends

    async def move(self, messages: int) -> None:
        for end in self._ends:
            _pipe(end.stdin).write(b"%d\n" % messages)
        for end in self._ends:
            await _pipe(end.stdout).readline()

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls) -> AsyncIterator["_GlooStream"]:
        """Start both processes, and wait until they have joined."""
        ends: list[asyncio.subprocess.Process] = []
        port = b"0"
        try:
            for rank in (0, 1):
                ends.append(await _python("benchmarks.gloo_stream", str(rank), port.decode()))
                if rank == 0:
                    port = (await _pipe(ends[0].stdout).readline()).strip()
            for end in ends:
                await _pipe(end.stdout).readline()
            yield cls(ends)
        finally:
            for end in ends:
                _pipe(end.stdin).close()
                await end.wait()


async def _python(module: str, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )


def _pipe(end: Any) -> Any:
    if end is None:
        raise RuntimeError("a process has no pipe")
    return end


class Bench:
    """Rates by name, one for each round."""

    def __init__(self, payload_bytes: int) -> None:
        self.payload_bytes = payload_bytes
        self.rates: dict[str, list[float]] = {}

    async def take(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Time one run of ``work``."""
        began_s = time.perf_counter()
        await work()
        taken_s = time.perf_counter() - began_s
        self.rates.setdefault(name, []).append(self.payload_bytes / taken_s)

    def gb_per_s(self, name: str) -> float:
        """Return the median rate of a name."""
        return statistics.median(self.rates[name]) / 1e9


async def measure(tokens: int, rounds: int, scattered: bool) -> Bench:
    """Run all rounds; the first one warms up and does not count."""
    shape = geometry(tokens)
    payload_bytes = tokens // BLOCK_TOKENS * shape.block_bytes
    bench = Bench(payload_bytes)
    warm_up = Bench(payload_bytes)
    pool = PoolView(memory_file(shape.pool_bytes)[1], shape)
    ours, theirs = (np.frombuffer(memory_file(payload_bytes)[1], dtype=np.uint8) for _ in range(2))
    options = ["--tokens", str(tokens), *["--scattered"] * scattered]
    channels = Channels()
    transports = connect_all(channels, FleetToken(TOKEN))

    async def memcpy() -> None:
        np.copyto(ours, theirs)

    async with (
        sender_process(*options) as peer,
        sender_process(*options, "--no-digests") as bare,
        _GlooStream.opened() as gloo,
    ):
        stream: Any = channels.to(peer.target.address).unary_stream(BARE)

        async def grpc_stream() -> None:
            async for _ in stream(b"%d" % (payload_bytes // MESSAGE_BYTES)):
                pass

        async def gloo_stream() -> None:
            await gloo.move(payload_bytes // MESSAGE_BYTES)

        for name, way in list(transports.items()):
            if not await connects(way, peer, rectangles(shape, tokens)[0]):
                sys.stdout.write(f"  {name}: not run, cannot connect\n")
                del transports[name]
                await way.close()
        for number in range(rounds + 1):
            into = bench if number else warm_up
            await into.take("memcpy", memcpy)
            await into.take("bare grpc.aio stream", grpc_stream)
            await into.take("bare gloo", gloo_stream)
            for name, way in transports.items():
                await into.take(name, partial(hand_off, way, name, peer, pool, tokens))
            name, way = next(iter(transports.items()))
            copied = partial(hand_off, way, name, bare, pool, tokens)
            with without_digests():
                await into.take(f"{name}, no digests", copied)
    for way in transports.values():
        await way.close()
    await channels.close()
    return bench


def main() -> None:
    """Print one line per transport."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024, help="length of the prompt")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds")
    parser.add_argument("--scattered", action="store_true", help="scatter pages over the pool")
    parser.add_argument("--send", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-digests", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    keep_message_memory()  # as workers do
    if options.send:
        with without_digests() if options.no_digests else contextlib.nullcontext():
            asyncio.run(send(options.tokens, options.scattered))
        return
    bench = asyncio.run(measure(options.tokens, options.rounds, options.scattered))
    pages = "scattered" if options.scattered else "consecutive"
    size = f"{bench.payload_bytes >> 20} MiB, {options.tokens} tokens of an 8B model"
    sys.stdout.write(f"transfer of {size}, {pages} pages; median of {options.rounds}\n")
    compared = {"grpc": "bare grpc.aio stream", "pair": "bare gloo"}
    for name in bench.rates:
        base = compared.get(name, "memcpy")
        ratio = bench.gb_per_s(name) / bench.gb_per_s(base)
        low, high = (end(bench.rates[name]) / 1e9 for end in (min, max))
        sys.stdout.write(
            f"  {name:26} {bench.gb_per_s(name):6.2f} GB/s ({low:.2f} to {high:.2f})"
            f"   {ratio:5.2f} of {base}\n"
        )


if __name__ == "__main__":
    main()
