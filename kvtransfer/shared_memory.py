"""Shared memory on one host: KV is copied from the sender's pages into the puller's.

The sender's pool is a memory file. Its descriptor comes over a Unix socket (SCM_RIGHTS;
``/proc/PID/fd`` would need the right to trace the sender, and one view of process ids), from a
sender of our user, after a mutual hello. We map it for reading. The socket stays open: the sender
lends pages over it, pull by pull. The kernel closes it when either process dies, so loans and
mappings end with the process that they depend on. The source handles readers that neither end a
loan nor die (``kvtransfer/sender.py``).

The descriptor goes to a reader of our user with the fleet's token, and a router's capability for
its first pull. It covers the whole pool, so a capability for one prompt opens all.
"""

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import socket
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from batonpb import common_pb2
from batonpb import prefill_pb2 as pb
from google.protobuf.message import DecodeError

from baton.telemetry.tasks import BackgroundTasks
from baton.wire.compatibility import geometry_of
from baton.wire.fleet_token import FleetToken
from baton.wire.grpc_channels import Channels
from kvtransfer import hello
from kvtransfer.chunk import PoolView
from kvtransfer.lent_pages import LentFrame
from kvtransfer.pool_source import PageLoan, PoolSource
from kvtransfer.transport import (
    LENGTH,
    Frame,
    FrameStream,
    Peer,
    ServingSide,
    TransportError,
    TransportGoneError,
    check_message_length,
    framed,
)

_LOG = logging.getLogger(__name__)

NAME = "shared_memory"
ATTACH_S = 1.0
FRAME_BYTES = 4 << 20  # usable by gRPC too, if it has to finish such a pull
MOST_LOANS = 256  # for one reader at a time
GRANTED = b"\1"  # a descriptor needs a byte to travel with
_BACKLOG = 128


def this_place() -> str:
    """Return the kernel, its network namespace and the hello's version, or "" without /proc.

    A Unix socket cannot cross the first two, and peers with another hello are not connected to.
    Addresses without a file belong to a network namespace: containers that share one share pools.
    """
    with contextlib.suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id}/{Path('/proc/self/ns/net').stat().st_ino}/{hello.VERSION}"
    return ""


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """Return the next message's bytes.

    Raises:
        IncompleteReadError: The connection ended.
        DecodeError: The message is longer than any valid one.
    """
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    check_message_length(length)
    return await reader.readexactly(length)


class SharedMemoryTransport:
    """Pulls from workers on the same host.

    Args:
        channels: Ignored; this transport has its own sockets.
        token: Proved to each sender, never sent.
    """

    frame_bytes = FRAME_BYTES

    def __init__(self, channels: Channels, token: FleetToken) -> None:
        self._token = token
        self._place = this_place()
        self._lines: dict[bytes, asyncio.Future[_Line]] = {}  # by incarnation
        self._tasks = BackgroundTasks("shared memory")

    def reaches(self, peer: Peer) -> bool:
        """Return whether a peer offers its pool, on this host."""
        offer = peer.offer(NAME)
        return offer is not None and bool(self._place) and offer.place == self._place

    def pull(self, peer: Peer, request: pb.PullRequest) -> FrameStream:
        """Request a loan of pages from a peer."""
        return _LentFrames(self, peer, request)

    async def close(self) -> None:
        """End all connections and mappings."""
        await self._tasks.close()

    async def line_to(self, peer: Peer, request: pb.PullRequest) -> "_Line":
        """Return the connection to a peer, or open one with the request's capability."""
        incarnation = peer.target.incarnation
        line = self._lines.get(incarnation)
        if line is None:
            line = self._lines[incarnation] = asyncio.get_running_loop().create_future()
            self._tasks.spawn(self._keep_line(peer, request, line), "line")
        return await asyncio.shield(line)

    async def _keep_line(
        self, peer: Peer, request: pb.PullRequest, opened: "asyncio.Future[_Line]"
    ) -> None:
        """Connect, and receive loans until the connection ends."""
        try:
            line = await self._connect(peer, request)
            opened.set_result(line)
            await line.listen()
        except TransportError as error:
            opened.set_exception(error)
            opened.exception()  # marks it as retrieved, in case no task waits any more
        finally:
            self._lines.pop(peer.target.incarnation, None)
            if not opened.done():
                opened.set_exception(TransportError("the worker is closing"))
                opened.exception()

    async def _connect(self, peer: Peer, request: pb.PullRequest) -> "_Line":
        offer = peer.offer(NAME)
        group = peer.capabilities.kv_groups[0] if peer.capabilities.kv_groups else None
        if offer is None or group is None:
            raise TransportError(f"{peer.target.worker_id} offers no pool")
        with contextlib.ExitStack() as undo:
            link = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            link.setblocking(False)
            try:
                async with asyncio.timeout(ATTACH_S):
                    pool = await self._attach(link, offer.address, request, group)
                    reader, writer = await asyncio.open_connection(sock=link)
            except (OSError, ValueError) as error:  # TimeoutError is an OSError
                reason = str(error) or type(error).__name__
                raise TransportError(f"the pool cannot be mapped: {reason}") from error
            undo.pop_all()
        return _Line(reader, writer, pool)

    async def _attach(
        self, link: socket.socket, address: str, request: pb.PullRequest, group: common_pb2.KvGroup
    ) -> PoolView:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(link, "\0" + address)
        hello.check_same_user(link)  # another user's process may have the name by now
        await hello.prove_to_worker(link, NAME, request.source_incarnation, self._token)
        attach = pb.PoolAttach(pull=request)
        attach.pull.ClearField("kv_slices")
        await loop.sock_sendall(link, framed(pb.PoolRequest(attach=attach)))
        pool_fd = await _receive_descriptor(link)
        try:
            size_bytes = os.fstat(pool_fd).st_size
            if not fcntl.fcntl(pool_fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("the file is not sealed against shrinking, so reads could crash")
            pool = mmap.mmap(pool_fd, size_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(pool_fd)
        one_block = geometry_of(group, 1)
        geometry = geometry_of(group, size_bytes // one_block.block_bytes)
        return PoolView(memoryview(pool)[: geometry.pool_bytes], geometry)


async def _receive_descriptor(link: socket.socket) -> int:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def note() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(link, note)
    try:
        await ready
    finally:
        loop.remove_reader(link)
    granted, descriptors, _, _ = socket.recv_fds(link, len(GRANTED), 1)
    if granted != GRANTED or len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ValueError("the sender refused")
    return descriptors[0]


class _Line:
    """Connection to one incarnation of a peer, with its mapped pool, which ends with it."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pool: PoolView
    ) -> None:
        self.pool = pool
        self._reader = reader
        self._writer = writer
        self._serials = count(1)
        self._waiting: dict[int, asyncio.Future[pb.PoolLoan]] = {}
        self._lent: set[int] = set()  # requested, and not ended
        self._turns = asyncio.Semaphore(MOST_LOANS)

    async def listen(self) -> None:
        """Deliver loans to the pulls that wait for them, until the connection ends."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, DecodeError):
            try:
                while True:
                    loan = pb.PoolLoan.FromString(await read_message(self._reader))
                    waiting = self._waiting.pop(loan.serial, None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(loan)
            finally:
                self._writer.close()
                for waiting in self._waiting.values():
                    if not waiting.done():
                        waiting.set_exception(TransportGoneError("the peer closed its socket"))
                        waiting.exception()

    async def ask(self, request: pb.PullRequest) -> tuple[int, "asyncio.Future[pb.PoolLoan]"]:
        """Request a loan once the sender's limit allows; return its number and its future.

        Raises:
            TransportGoneError: The connection ended.
        """
        await self._turns.acquire()
        try:
            await self._writer.drain()
            if self._writer.is_closing():
                raise ConnectionResetError("the peer closed its socket")
        except BaseException as error:
            self._turns.release()
            if isinstance(error, OSError):
                raise TransportGoneError(str(error)) from error
            raise
        serial = next(self._serials)
        self._lent.add(serial)
        waiting = self._waiting[serial] = asyncio.get_running_loop().create_future()
        self._writer.write(framed(pb.PoolRequest(serial=serial, pull=request)))
        return serial, waiting

    def let_go(self, serial: int) -> None:
        """End a loan: its pages are read, or will not be."""
        self._waiting.pop(serial, None)
        if serial in self._lent:
            self._lent.remove(serial)
            self._turns.release()
        if not self._writer.is_closing():
            self._writer.write(framed(pb.PoolRequest(serial=serial, let_go=pb.Release())))


class _LentFrames:
    """A pull: one loan with all pages."""

    def __init__(
        self, transport: SharedMemoryTransport, peer: Peer, request: pb.PullRequest
    ) -> None:
        self._transport = transport
        self._peer = peer
        self._request = request
        self._line: _Line | None = None
        self._serial = 0
        self._asked = False

    async def read(self) -> Sequence[Frame]:
        if self._asked:
            return []
        self._asked = True
        line = self._line = await self._transport.line_to(self._peer, self._request)
        self._serial, coming = await line.ask(self._request)
        loan = await coming
        return [LentFrame(chunk, line.pool) for chunk in loan.chunks]

    def close(self) -> None:
        line = self._line
        self._line = None
        if line is not None and self._serial:
            line.let_go(self._serial)


class SharedMemoryServer:
    """Serves one worker's pool on a Unix socket without a file."""

    def __init__(self, side: ServingSide) -> None:
        self._side = side
        self._address = f"baton-kv/{side.incarnation.hex()}"
        self._place = this_place() if side.pool_fd >= 0 else ""  # one pool, with all heads
        self._tasks = BackgroundTasks("shared memory")
        self._listener: socket.socket | None = None

    @property
    def offer(self) -> common_pb2.TransportOffer | None:
        """Address of the socket; None without a single pool or such sockets."""
        if not self._place:
            return None
        return common_pb2.TransportOffer(name=NAME, place=self._place, address=self._address)

    async def start(self, source: PoolSource) -> None:
        """Start listening. If that fails, readers cannot connect and pull by gRPC."""
        if not self._place:
            return
        self._listener = listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind("\0" + self._address)
            listener.listen(_BACKLOG)
        except OSError as error:
            _LOG.warning("cannot offer shared memory, readers on this host use gRPC: %s", error)
            return

        async def serve(link: socket.socket) -> None:
            reader, writer = await asyncio.open_connection(sock=link)
            await _Lender(self._side, source, reader, writer).run()

        gate = hello.HelloGate(listener, self._hello, serve, ATTACH_S, self._tasks)
        self._tasks.keep(gate.run, "accept")

    async def close(self) -> None:
        """Stop listening, and end all loans."""
        await self._tasks.close()
        if self._listener is not None:
            self._listener.close()

    async def _hello(self, link: socket.socket) -> None:
        link.setblocking(False)
        hello.check_same_user(link)
        await hello.prove_to_reader(link, NAME, self._side.incarnation, self._side.token)


class _Lender:
    def __init__(
        self,
        side: ServingSide,
        source: PoolSource,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._side = side
        self._source = source
        self._reader = reader
        self._writer = writer
        self._loans: dict[int, PageLoan | None] = {}  # None: the source has not answered yet
        self._tasks = BackgroundTasks("lender")

    async def run(self) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError, DecodeError, ValueError):
                async with asyncio.timeout(ATTACH_S):
                    first = pb.PoolRequest.FromString(await read_message(self._reader))
                if not self._source.may_attach(first.attach.pull):
                    return
                self._grant()
                while True:
                    request = pb.PoolRequest.FromString(await read_message(self._reader))
                    await self._writer.drain()  # a reader that does not read may not send more
                    self._take(request)
        finally:
            loans = self._loans
            self._loans = {}
            for loan in loans.values():
                if loan is not None:
                    loan.end()
            self._writer.close()
            await self._tasks.close()

    def _grant(self) -> None:
        with self._writer.get_extra_info("socket").dup() as link:
            socket.send_fds(link, [GRANTED], [self._side.pool_fd])

    def _take(self, request: pb.PoolRequest) -> None:
        match request.WhichOneof("request"):
            case "pull":
                if request.serial in self._loans:
                    raise ValueError(f"loan {request.serial} exists already")
                if max(len(self._loans), len(self._tasks)) >= MOST_LOANS:
                    self._answer(request.serial, ())  # no pages: the reader falls back
                    return
                self._loans[request.serial] = None
                self._tasks.vital(self._lend(request), "lend", lambda _: self._writer.close())
            case "let_go":
                loan = self._loans.pop(request.serial, None)
                if loan is not None:
                    loan.end()
            case other:
                raise ValueError(f"unknown request {other!r}")

    async def _lend(self, request: pb.PoolRequest) -> None:
        loan = await self._source.lend(request.pull)
        if request.serial not in self._loans:  # ended, or the connection closed, meanwhile
            loan.end()
            return
        self._loans[request.serial] = loan
        self._answer(request.serial, loan.chunks)

    def _answer(self, serial: int, chunks: Sequence[pb.ChunkHeader]) -> None:
        self._writer.write(framed(pb.PoolLoan(serial=serial, chunks=chunks)))
