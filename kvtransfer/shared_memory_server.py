"""Shared memory on one host, the sending side: lends pages of the pool to readers that map it.

A reader of our user that has the fleet's token, and a router's word for its first pull, gets the
pool's descriptor, opened for reading: of the whole pool, so a word for one prompt opens all. Each
pull is a loan: it ends when the reader lets go, or when the kernel closes the connection because
the reader is gone. A reader that does neither is the source's to leave behind
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
from kvtransfer.listening.gate import Gate
from kvtransfer.listening.hello import check_same_user, prove_to_reader
from kvtransfer.shared_memory import (
    ATTACH_S,
    GRANTED,
    MOST_LOANS,
    NAME,
    framed,
    read_message,
    this_place,
)
from kvtransfer.transport import FrameSource, Loan, ServingSide

_LOG = logging.getLogger(__name__)

_BACKLOG = 128


class SharedMemoryServer:
    """Serves one worker's pool on a Unix socket without a file.

    Args:
        side: Of this worker.
    """

    def __init__(self, side: ServingSide) -> None:
        self._side = side
        self._address = f"baton-kv/{side.incarnation.hex()}"
        self._place = this_place() if side.pool_fd >= 0 else ""  # one pool, with all heads
        self._tasks = BackgroundTasks("shared memory")
        self._listener: socket.socket | None = None

    @property
    def offer(self) -> common_pb2.TransportOffer | None:
        """Where to knock; None where there is no such pool, or the kernel has no such sockets."""
        if not self._place:
            return None
        return common_pb2.TransportOffer(name=NAME, place=self._place, address=self._address)

    async def start(self, source: FrameSource) -> None:
        """Listen. Where that fails, readers fail to connect and pull by gRPC."""
        if not self._place:
            return
        self._listener = listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind("\0" + self._address)
            listener.listen(_BACKLOG)
        except OSError as error:
            _LOG.warning("no shared memory for readers on this host: %s", error)
            return

        async def serve(link: socket.socket, _: None) -> None:
            reader, writer = await asyncio.open_connection(sock=link)
            await _Lender(self._side, source, reader, writer).run()

        gate = Gate(listener, self._hello, serve, ATTACH_S, self._tasks)
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
    """One reader's connection.

    Args:
        side: Of this worker.
        source: Lends the pages.
        reader: From the reader.
        writer: To it.
    """

    def __init__(
        self,
        side: ServingSide,
        source: FrameSource,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._side = side
        self._source = source
        self._reader = reader
        self._writer = writer
        self._loans: dict[int, Loan | None] = {}  # None: the source has not answered yet
        self._tasks = BackgroundTasks("lender")

    async def run(self) -> None:
        """Lend until the reader goes; nothing stays lent."""
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError, DecodeError, ValueError):
                async with asyncio.timeout(ATTACH_S):
                    first = pb.PoolRequest.FromString(await read_message(self._reader))
                if not self._source.may_attach(first.attach.pull):
                    return
                self._grant()
                while True:
                    request = pb.PoolRequest.FromString(await read_message(self._reader))
                    await self._writer.drain()  # who does not read is not listened to
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
                    raise ValueError(f"loan {request.serial} is given already")
                if max(len(self._loans), len(self._tasks)) >= MOST_LOANS:
                    self._answer(request.serial, ())  # no pages: it is pulled another way
                    return
                self._loans[request.serial] = None
                self._tasks.vital(self._lend(request), "lend", lambda _: self._writer.close())
            case "let_go":
                loan = self._loans.pop(request.serial, None)
                if loan is not None:
                    loan.end()
            case other:
                raise ValueError(f"{other} is no request of a reader")

    async def _lend(self, request: pb.PoolRequest) -> None:
        loan = await self._source.lend(request.pull)
        if request.serial not in self._loans:  # let go, or the connection ended, meanwhile
            loan.end()
            return
        self._loans[request.serial] = loan
        self._answer(request.serial, loan.chunks)

    def _answer(self, serial: int, chunks: Sequence[pb.ChunkHeader]) -> None:
        self._writer.write(framed(pb.PoolLoan(serial=serial, chunks=chunks)))
