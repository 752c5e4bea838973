"""Messages from the leader to a rank that shares no memory with it, on one gRPC stream.

    leader's shell                                   fleet/worker/rank.py, on the rank's host
      Begin ─────────────────────────────────────▶   start the rank's engine process
      Serve ─────────────────────────────────────▶   map its pool, answer pulls of its heads
      Hold, Publish ───────────── published ◀────    (a slice is announced once its rank has it)
      Revoke ────────────────────given back ◀────    (pages are free when their reads have ended)
      Take ─────────────────────────── taken ◀───    (a frame counts when each rank has its own)
                                        sent ◀───    (bytes that left its pool)

The stream exists as long as both processes. When it breaks, the rank and its replica have failed.
"""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

import grpc.aio
from batonpb import prefill_pb2 as pb
from batonpb import rank_pb2, rank_pb2_grpc

from baton.addresses import join_address, split_address
from baton.telemetry.alive_clock import ALIVE
from baton.telemetry.tasks import BackgroundTasks
from baton.wire.fleet_token import FleetToken

_BEGIN_S = 60.0
_SILENT_S = 5.0  # a rank sends something every half second


class RankGoneError(Exception):
    """The stream to a rank broke; the text names the rank."""


class RankLink:
    """The leader's connection to one rank.

    Args:
        address: Address of the rank's program, for messages and for pulls of its heads.
        channel: gRPC channel to that address; its owner closes it.
        note_sent: Called with bytes of KV that were pulled from the rank.
    """

    def __init__(
        self,
        rank: int,
        address: str,
        channel: grpc.aio.Channel,
        token: FleetToken,
        note_sent: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.rank = rank
        self.address = address
        self.pid = 0
        self.host = ""
        """Host of the rank's engine process, known once it serves (and so is its pid)."""
        self._note_sent = note_sent
        stub = rank_pb2_grpc.RankStub(channel)
        self._call: Any = stub.Link(metadata=token.metadata)
        self._words: asyncio.Queue[rank_pb2.LeaderWord] = asyncio.Queue()
        self._serials = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._on_given_back: dict[str, Callable[[], None]] = {}
        loop = asyncio.get_running_loop()
        self._listens: asyncio.Future[rank_pb2.RankListens] = loop.create_future()
        self._serves: asyncio.Future[rank_pb2.RankServes] = loop.create_future()
        self.broken: asyncio.Future[str] = loop.create_future()
        self._tasks = BackgroundTasks("rank link")
        self._tasks.vital(self._write_all(), "write", self._broke)
        self._tasks.vital(self._listen(), "listen", self._broke)

    async def begin(self, engine_settings: bytes) -> str:
        """Start the rank's engine process; return where it listens: ``HOST:PORT/SECRET``."""
        begin = rank_pb2.RankBegin(rank=self.rank, engine_settings=engine_settings)
        self._send(begin=begin)
        listens = await self._until(self._listens)
        host, _ = split_address(self.address)
        return f"{join_address(host, listens.port)}/{listens.secret}"

    async def serve(self, serve: rank_pb2.RankServe) -> None:
        """Map the rank's pool and serve its heads."""
        self._send(serve=serve)
        serves = await self._until(self._serves)
        self.pid = serves.pid
        self.host = serves.host

    def hold(self, hold: rank_pb2.RankHold, on_given_back: Callable[[], None]) -> None:
        """Give a prompt its pages; ``on_given_back`` is called once, some time after ``revoke``."""
        self._on_given_back[hold.name] = on_given_back
        self._send(hold=hold)

    def publish(self, name: str, kv_slice: pb.KvSlice) -> "asyncio.Future[None]":
        """Publish a computed rectangle of the rank's heads; done when it may be pulled there."""
        serial, known = self._expect()
        self._send(publish=rank_pb2.RankPublish(serial=serial, name=name, kv_slice=kv_slice))
        return known

    def revoke(self, name: str) -> None:
        """End a KV transfer: the rank sends no more of it."""
        self._send(revoke=rank_pb2.RankRevoke(name=name))

    async def take(self, what: rank_pb2.RankTake) -> rank_pb2.RankTaken:
        """Have the rank pull slices into its own pool.

        Raises:
            RankGoneError: The link broke; it is unknown what the rank wrote.
        """
        serial, taken = self._expect()
        numbered = rank_pb2.RankTake()
        numbered.CopyFrom(what)
        numbered.serial = serial
        self._send(take=numbered)
        found: rank_pb2.RankTaken = await taken
        return found

    async def close(self) -> None:
        """Close the stream, which ends the rank."""
        self._call.cancel()
        await self._tasks.close()
        self._broke(RankGoneError("closed"))

    def _expect(self) -> tuple[int, "asyncio.Future[Any]"]:
        serial = next(self._serials)
        answer = self._waiting[serial] = asyncio.get_running_loop().create_future()
        if self.broken.done():
            self._end(answer)
        return serial, answer

    def _send(self, **word: Any) -> None:
        self._words.put_nowait(rank_pb2.LeaderWord(**word))

    async def _until(self, answer: "asyncio.Future[Any]") -> Any:
        async with asyncio.timeout(_BEGIN_S):
            await asyncio.wait([answer, self.broken], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise RankGoneError(self.broken.result())
        return answer.result()

    async def _write_all(self) -> None:
        while True:
            await self._call.write(await self._words.get())

    async def _listen(self) -> None:
        while True:
            async with ALIVE.timeout(_SILENT_S):
                word = await self._call.read()
            if word is grpc.aio.EOF:
                raise RankGoneError("the stream ended")
            match word.WhichOneof("word"):
                case "listens":
                    self._listens.set_result(word.listens)
                case "serves":
                    self._serves.set_result(word.serves)
                case "published":
                    self._answer(word.published, None)
                case "taken":
                    self._answer(word.taken.serial, word.taken)
                case "given_back":
                    self._on_given_back.pop(word.given_back)()
                case "sent_bytes":
                    self._note_sent(word.sent_bytes)

    def _answer(self, serial: int, answer: object) -> None:
        waiting = self._waiting.pop(serial)
        if not waiting.done():
            waiting.set_result(answer)

    def _broke(self, error: Exception) -> None:
        if not self.broken.done():
            details = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            details = details or f"no message for {_SILENT_S:.0f} s"
            self.broken.set_result(f"rank {self.rank} at {self.address} is gone: {details}")
        for answer in self._waiting.values():
            self._end(answer)
        self._waiting.clear()

    def _end(self, answer: "asyncio.Future[Any]") -> None:
        if not answer.done():
            answer.set_exception(RankGoneError(self.broken.result()))
            answer.exception()  # marks it as retrieved, in case no task waits any more
