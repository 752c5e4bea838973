"""A rank of a replica as a separate program, which shares only TCP with its leader.

    leader's host                            this host
      worker's shell  ── gRPC: Link ───────▶   this program ── gRPC: Pull ◀── other workers' ranks
      engine (rank 0) ── TCP: commands ────▶   engine process of the rank (a child)
           └───────────── gloo: tensors ─────────┘     └── memory file: its pool ──┘

It serves one leader, once: it exits when the leader's stream or the engine process ends. Commands
and tensors are sent in plain text. In a fleet a Ray actor runs it (``fleet.pools.ray_ranks``); by
hand it is ``python -m fleet.worker.rank``.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from typing import Any

import grpc.aio
import msgspec
from batonpb import prefill_pb2 as pb
from batonpb import rank_pb2, rank_pb2_grpc

from baton.addresses import family_of, join_address
from baton.config.network import is_loopback
from baton.engine.core.split import owned_heads, rank_geometries
from baton.engine.cpu.parallel.rank_sockets import read_hello, steady
from baton.engine.ipc import map_pool
from baton.engine.parent import die_with_parent
from baton.engine.settings import EngineSettings
from baton.telemetry.logs import set_up_logs
from baton.telemetry.tasks import BackgroundTasks
from baton.types.errors import InternalError
from baton.wire.capability import refusal
from baton.wire.compatibility import geometry_of
from baton.wire.fleet_token import FleetToken, TokenInterceptor
from baton.wire.grpc_channels import Channels
from baton.wire.grpc_options import SERVER_OPTIONS, listen
from baton.wire.message_memory import keep_message_memory
from baton.wire.process_end import exit_process
from fleet.ports import free_port
from kvtransfer.chunk import PoolView
from kvtransfer.fault_injection import FrameTamperer
from kvtransfer.grpc_transport import GrpcServer, GrpcTransport
from kvtransfer.hello_gate import Gate
from kvtransfer.pool_source import HeldKv, Key, PoolSource
from kvtransfer.ranks.rank_side import RankHandoffs, take
from kvtransfer.transport import Loan, Room, ServingSide

_LOG = logging.getLogger(__name__)

_BEAT_S = 0.5
_CONNECT_S = 60.0  # limit for the connections of the leader's engine
_HELLO_S = 5.0
_LINKS = 2  # connections of the leader's engine: for commands, and for adapters


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the program; the engine's settings come from the leader."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: one of ``ports``
    ports: str = ""  # allowed range FIRST-LAST; empty: the kernel chooses
    fleet_token: str = ""
    fleet_token_file: str = ""
    insecure: bool = False  # allow plain text to other hosts
    fault_injection: str = ""


class RankProgram(rank_pb2_grpc.RankServicer):
    """gRPC service of one rank, which its leader connects to."""

    def __init__(self, settings: RankSettings, token: FleetToken) -> None:
        self._settings = settings
        self._token = token
        self._channels = Channels()
        self._transport = GrpcTransport(self._channels, token)
        self._tamperer = FrameTamperer.parse(settings.fault_injection)
        self._tasks = BackgroundTasks("rank")
        self._words: asyncio.Queue[rank_pb2.RankWord | None] = asyncio.Queue()
        self._engine: asyncio.subprocess.Process | None = None
        self._begin: rank_pb2.RankBegin | None = None
        self._serve = rank_pb2.RankServe()
        self._pool_fd = -1
        self._pool: PoolView | None = None
        self._handoffs: RankHandoffs | None = None
        self._source: PoolSource | None = None
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def Link(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[rank_pb2.LeaderWord], context: Any
    ) -> AsyncIterator[rank_pb2.RankWord]:
        """Serve the leader's stream; a second leader is rejected."""
        if self._begin is not None:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "this rank already has a leader"
            )
        self._begin = rank_pb2.RankBegin()
        self._tasks.vital(self._listen(request_iterator), "listen", self._broke)
        try:
            while (word := await self._next_word()) is not None:
                yield word
        finally:
            self._end(0)

    async def _next_word(self) -> rank_pb2.RankWord | None:
        try:
            async with asyncio.timeout(_BEAT_S):
                return await self._words.get()
        except TimeoutError:
            return rank_pb2.RankWord(beat=pb.Renew())

    async def _listen(self, words: AsyncIterator[rank_pb2.LeaderWord]) -> None:
        with contextlib.suppress(grpc.aio.UsageError):  # gRPC raises it for a cancelled stream
            async for word in words:
                await self._on_word(word)
        self._end(0)

    async def _on_word(self, word: rank_pb2.LeaderWord) -> None:
        kind = word.WhichOneof("word")
        if kind == "begin":
            self._begin = word.begin
            self._start_engine(word.begin)
        elif kind == "serve":
            self._serve_pool(word.serve)
        elif self._pool is None or self._handoffs is None:
            raise ValueError(f"{kind} before serve")
        elif kind == "hold":
            self._handoffs.hold(word.hold)
        elif kind == "publish":
            self._handoffs.publish(word.publish)
            self._say(published=word.publish.serial)
        elif kind == "revoke":
            self._handoffs.revoke(word.revoke.name)
        elif kind == "take":
            self._tasks.vital(self._take(word.take, self._pool), "take", self._broke)

    async def _take(self, word: rank_pb2.RankTake, pool: PoolView) -> None:
        self._say(taken=await take(word, pool, self._transport))

    def _say(self, **word: Any) -> None:
        self._words.put_nowait(rank_pb2.RankWord(**word))

    def _start_engine(self, begin: rank_pb2.RankBegin) -> None:
        host = self._settings.host
        family = family_of(host)
        port = free_port(host, self._settings.ports)
        server = socket.create_server((host, port), family=family)
        server.setblocking(False)
        secret = secrets.token_hex(16)
        self._tasks.vital(self._run_engine(begin, server, secret), "engine", self._broke)
        listens = rank_pb2.RankListens(port=server.getsockname()[1], secret=secret)
        self._say(listens=listens)

    async def _run_engine(
        self, begin: rank_pb2.RankBegin, server: socket.socket, secret: str
    ) -> None:
        """Pass the leader's two connections to the engine process and wait for its exit."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(server)
            async with asyncio.timeout(_CONNECT_S):
                orders, loader, store = await _leader(server, secret)
            undo.enter_context(orders)
            undo.enter_context(loader)
            self._pool_fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC)
            fds = (orders.fileno(), loader.fileno(), self._pool_fd)
            settings = msgspec.json.decode(begin.engine_settings, type=EngineSettings)
            settings = settings.on(len(os.sched_getaffinity(0)))
            threads = str(settings.threads)
            self._engine = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "baton.engine.cpu.parallel.rank",
                str(begin.rank),
                *map(str, fds),
                store,
                msgspec.json.encode(settings).decode(),
                pass_fds=fds,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": threads,
                    "MKL_NUM_THREADS": threads,
                    "OMP_WAIT_POLICY": "passive",
                },
            )
        code = await self._engine.wait()
        self._end(min(abs(code), 1))  # 0: the leader's engine has ended

    def _serve_pool(self, serve: rank_pb2.RankServe) -> None:
        rank = self._begin.rank if self._begin is not None else 0
        whole = geometry_of(serve.kv_group, serve.num_blocks)
        heads = owned_heads(rank, serve.ranks, whole.num_kv_heads)
        part = rank_geometries(whole, serve.ranks)[rank]
        self._serve = serve
        self._pool = PoolView(map_pool(self._pool_fd, part), part, heads.start)
        self._handoffs = RankHandoffs(self._pool, lambda name: self._say(given_back=name))
        self._source = PoolSource(
            self._pool,
            serve.incarnation,
            self._held,
            lambda sent_bytes: self._say(sent_bytes=sent_bytes),
            self._refusal,
            self._tamperer,
        )
        pid = self._engine.pid if self._engine is not None else 0
        self._say(serves=rank_pb2.RankServes(pid=pid, host=socket.gethostname()))

    def _held(self, key: Key) -> HeldKv | None:
        return self._handoffs.find(key) if self._handoffs is not None else None

    def _refusal(self, request: pb.PullRequest) -> str:
        """Check the capability of a pull as the leader does; return why it is rejected."""
        if not self._token.accepted or self._handoffs is None:
            return ""
        reader = request.reader_incarnation
        holder = self._serve.incarnation
        why = refusal(
            request.capability, self._token, request.request_id, holder, reader, time.time()
        )
        if not why or (why == "missing" and self._serve.unsigned_pulls):
            return ""
        _LOG.warning("rejecting a KV pull: %s request_id=%s", why, request.request_id)
        return why

    def source(self) -> PoolSource:
        """Return the source of KV pulls.

        Raises:
            ValueError: The leader has not yet started it.
        """
        if self._source is None:
            raise ValueError("this rank serves no pool yet")
        return self._source

    def _broke(self, error: Exception) -> None:
        _LOG.error("stopping the rank: %s: %s", type(error).__name__, error)
        self._end(1)

    def _end(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)
        self._words.put_nowait(None)

    async def close(self) -> None:
        """End the engine process and all connections."""
        if self._engine is not None and self._engine.returncode is None:
            self._engine.kill()
            await self._engine.wait()
        await self._tasks.close()
        await self._channels.close()


class _LatePool:
    """``transport.FrameSource`` that may start before the program has a pool."""

    def __init__(self, program: RankProgram) -> None:
        self._program = program

    def frames(self, request: pb.PullRequest, room: Room) -> AsyncIterator[int]:
        return self._program.source().frames(request, room)

    async def lend(self, request: pb.PullRequest) -> Loan:
        return await self._program.source().lend(request)

    def may_attach(self, request: pb.PullRequest) -> bool:
        return self._program.source().may_attach(request)


async def _leader(server: socket.socket, secret: str) -> tuple[socket.socket, socket.socket, str]:
    """Return both connections of the leader's engine in order, and the address of gloo's store."""
    serials = count()
    found: list[tuple[int, socket.socket, str]] = []
    both = asyncio.get_running_loop().create_future()

    async def hello(link: socket.socket) -> tuple[int, str]:
        serial = next(serials)  # before the first await: the order of acceptance
        message = await read_hello(link)
        if not secrets.compare_digest(message.secret.encode(), secret.encode()):
            raise PermissionError("wrong secret")
        return serial, message.store

    async def keep(link: socket.socket, received: tuple[int, str]) -> None:
        serial, store = received
        found.append((serial, link, store))
        if len(found) == _LINKS and not both.done():
            both.set_result(None)

    tasks = BackgroundTasks("rank hello")
    try:
        async with tasks.beside(Gate(server, hello, keep, _HELLO_S, tasks).run(), "accept"):
            await both
    except BaseException:
        for _, link, _ in found:
            link.close()
        raise
    finally:
        await tasks.close()
    (_, orders, store), (_, loader, _), *more = sorted(found, key=lambda one: one[0])
    for _, link, _ in more:
        link.close()
    for link in (orders, loader):
        steady(link)
        link.setblocking(True)
    return orders, loader, store


@asynccontextmanager
async def running(settings: RankSettings) -> AsyncIterator[tuple[str, asyncio.Future[int]]]:
    """Run one rank; yield its address, and the future of its exit code.

    Raises:
        InternalError: Plain text to other hosts is not allowed, or no port is free.
        SecretError: The token's file cannot be used.
    """
    keep_message_memory()
    token = FleetToken.of(settings.fleet_token_file, settings.fleet_token)
    if not (settings.insecure or is_loopback(settings.host)):
        raise InternalError(
            f"host = {settings.host}: a rank sends plain text to other hosts; set `insecure: true`"
        )
    async with AsyncExitStack() as undo:
        program = RankProgram(settings, token)
        undo.push_async_callback(program.close)
        server = grpc.aio.server(
            interceptors=[TokenInterceptor(token)],
            options=SERVER_OPTIONS,
        )
        free = settings.port or free_port(settings.host, settings.ports)
        port = listen(server, join_address(settings.host, free))
        rank_pb2_grpc.add_RankServicer_to_server(program, server)
        await GrpcServer(ServingSide(server, token, b"", -1)).start(_LatePool(program))
        undo.push_async_callback(server.stop, None)
        await server.start()
        yield join_address(settings.host, port), program.ended


async def serve(settings: RankSettings) -> int:
    """Run one rank, print its address to standard output, and return its exit code."""
    async with running(settings) as (address, ended):
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()
        return await ended


def main() -> None:
    """Run ``python -m fleet.worker.rank`` with settings as JSON on standard input."""
    die_with_parent()
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=RankSettings)
    set_up_logs("text")
    exit_process(asyncio.run(serve(settings)))


if __name__ == "__main__":
    main()
