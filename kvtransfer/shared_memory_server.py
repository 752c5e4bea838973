"""Shared memory on one host, the sending side: lends pages of the pool to readers that map it.

A reader of our user with the fleet's token, and a router's capability for its first pull, gets the
pool's descriptor, opened for reading. It covers the whole pool, so a capability for one prompt
opens all. Each pull is a loan. It ends when the reader ends it, or when the kernel closes the
connection because the reader is gone. The source handles readers that do neither
(``kvtransfer/sender.py``).
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence

from batonpb import common_pb2
from batonpb import prefill_pb2 as pb
from google.protobuf.message import DecodeError

from baton.telemetry.tasks import BackgroundTasks
from kvtransfer.hello import check_same_user, prove_to_reader
from kvtransfer.hello_gate import HelloGate
from kvtransfer.pool_source import PageLoan, PoolSource
from kvtransfer.shared_memory import (
    ATTACH_S,
    GRANTED,
    MOST_LOANS,
    NAME,
    framed,
    read_message,
    this_place,
)
from kvtransfer.transport import ServingSide

_LOG = logging.getLogger(__name__)

_BACKLOG = 128


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

        async def serve(link: socket.socket, _: None) -> None:
            reader, writer = await asyncio.open_connection(sock=link)
            await _Lender(self._side, source, reader, writer).run()

        gate = HelloGate(listener, self._hello, serve, ATTACH_S, self._tasks)
        self._tasks.keep(gate.run, "accept")

    async def close(self) -> None:
        """Stop listening, and end all loans."""
        await self._tasks.close()
        if self._listener is not None:
            self._listener.close()

    async def _hello(self, link: socket.socket) -> None:
        link.setblocking(False)
        check_same_user(link)
        await prove_to_reader(link, NAME, self._side.incarnation, self._side.token)


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
