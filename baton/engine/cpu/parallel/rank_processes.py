"""The leader's connections to the other ranks of its replica, and their processes.

    shell ── commands ──▶ leader (rank 0: scheduler, sampling, its part of the model)
                            │  Unix socket to each rank: Load, Open, Adapt, Forward, Copy, ...
                            ▼
                          rank 1, rank 2, ...   (python -m baton.engine.cpu.parallel.rank)
                            ▲
                            └── all ranks: tensors through one collective group (shard.py)

A rank that ends closes its socket, which the leader sees between steps; within a step the group
breaks. Either way the leader raises ``RankError``, and the whole replica fails. Ranks end with
their leader (``PDEATHSIG``, and the end of their socket).

Adapters are read beside the steps, by one thread of each rank over a second socket. When all ranks
have read an adapter, putting it to use is an order like any other, and takes no time.
"""

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np

from baton.engine.core.plan import PlanRow
from baton.engine.ipc import LENGTH, FrameReader
from baton.engine.settings import EngineSettings
from baton.types.errors import AdapterLoadError, InternalError
from baton.types.geometry import KvGeometry
from baton.types.params import AdapterRef

STEP_TIMEOUT_S = 10.0
"""Time after which a rank in a collective is considered hanging."""
LOAD_TIMEOUT_S = 600.0  # the shell has its own, shorter timeout

_T = TypeVar("_T")


GROUP_BROKE = "the group of ranks broke"
"""Beginning of the error of a rank whose collective operation has lost another rank."""


class RankError(InternalError):
    """A rank died or hangs, so the replica fails."""

    code = "rank_failed"


class LoadWeights(msgspec.Struct, frozen=True, tag=True):
    """Order to read the weights; the cache of converted ones exists by then."""


class OpenPool(msgspec.Struct, frozen=True, tag=True):
    """Order to use this pool: the given file (``shared``), or private memory for self-tests.

    ``geometry`` counts the heads of the whole model. ``tiling`` has the fields of
    ``baton.engine.cpu.attention.AttentionTiling``.
    """

    geometry: KvGeometry
    tiling: tuple[int, int, int, int]
    shared: bool


class RankRow(msgspec.Struct, frozen=True, array_like=True):
    """``count`` tokens from position ``start``; ``blocks`` are packed little-endian uint32."""

    count: int
    start: int
    blocks: bytes
    adapter: str = ""

    @classmethod
    def of(cls, row: PlanRow) -> "RankRow":
        """Return what a rank needs of a plan's row; embeddings come through the group."""
        blocks = np.asarray(row.block_ids, dtype="<u4").tobytes()
        return cls(len(row.tokens), row.start, blocks, row.adapter)

    def plan_row(self) -> PlanRow:
        """Return the row again, with placeholder tokens."""
        blocks: list[int] = np.frombuffer(self.blocks, dtype="<u4").tolist()
        return PlanRow(
            sequence_id=0,
            tokens=[0] * self.count,
            start=self.start,
            block_ids=blocks,
            adapter=self.adapter,
        )


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Order to read this adapter beside the steps, and to report the result."""

    ref: AdapterRef


class Adapt(msgspec.Struct, frozen=True, tag=True):
    """Order to use this adapter; all ranks have read it."""

    ref: AdapterRef


class Drop(msgspec.Struct, frozen=True, tag=True):
    """Order to drop this adapter: the used one, or, to a loader, the one that was read."""

    digest: str


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Order to run a forward pass over these rows."""

    rows: list[RankRow]
    isolated: bool


class CopyBlocks(msgspec.Struct, frozen=True, tag=True):
    """Order to copy blocks, from and to, in the rank's own pool."""

    blocks: list[tuple[int, int]]


class Clear(msgspec.Struct, frozen=True, tag=True):
    """Order to zero what these rows wrote into the rank's own pool."""

    rows: list[RankRow]


class ComputeLogits(msgspec.Struct, frozen=True, tag=True):
    """Order to compute the LM head for so many rows."""

    rows: int


Order = LoadWeights | OpenPool | Adapt | Drop | Forward | CopyBlocks | Clear | ComputeLogits
LoaderOrder = Prepare | Drop


class Started(msgspec.Struct, frozen=True, tag=True):
    """Report that a rank is about to join its group."""


class WeightsLoaded(msgspec.Struct, frozen=True, tag=True):
    """Report that a rank has its weights."""


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """Report that a rank has read the adapter, or (``problem``) could not."""

    digest: str
    problem: str = ""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Report that a rank failed; its process ends."""

    message: str


Answer = Started | WeightsLoaded | Failed

_encoder = msgspec.msgpack.Encoder()


def frame(message: Order | LoaderOrder | Answer | Prepared) -> bytes:
    """Return a message with its length before it."""
    body = _encoder.encode([message])
    return LENGTH.pack(len(body)) + body


@dataclass(slots=True)
class _Rank:
    process: subprocess.Popen[bytes]
    loader: socket.socket
    loader_reader: FrameReader[Prepared]
    socket: socket.socket
    reader: FrameReader[Answer]
    reached: list[type] = field(default_factory=list)
    closed: bool = False
    failed: str = ""


class RankProcesses:
    """Ranks 1 and up of one replica.

    Args:
        settings: Engine settings, with the number of ranks in ``tensor_parallel``.
        pool_fd: Memory file of the KV pool, -1 without one.
        own_fds: Memory files of ranks 1 and up, if each has its own.
    """

    def __init__(
        self, settings: EngineSettings, pool_fd: int = -1, own_fds: Sequence[int] = ()
    ) -> None:
        # Where ranks find each other; gone with the processes. It is never closed: torch opens it
        # again when it frees the group, by a path that would name another file by then.
        store_fd = os.memfd_create("baton-ranks")
        self.store = f"/proc/self/fd/{store_fd}"
        self._store_fd = store_fd
        pool_fds = own_fds or [pool_fd] * (settings.tensor_parallel - 1)
        self._ranks = [self._spawn(rank, settings, fd) for rank, fd in enumerate(pool_fds, 1)]

    def _spawn(self, rank: int, settings: EngineSettings, pool_fd: int) -> _Rank:
        ours, theirs = socket.socketpair()
        our_loader, their_loader = socket.socketpair()
        sockets = [theirs.fileno(), their_loader.fileno()]
        keep = [*sockets, self._store_fd, *([pool_fd] if pool_fd >= 0 else [])]
        encoded = msgspec.json.encode(settings).decode()
        arguments = [*map(str, (rank, *sockets, pool_fd)), self.store, encoded]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "baton.engine.cpu.parallel.rank", *arguments],
            pass_fds=keep,
        )
        theirs.close()
        their_loader.close()
        our_loader.settimeout(LOAD_TIMEOUT_S)
        loaded = FrameReader(msgspec.msgpack.Decoder(list[Prepared]))
        return _Rank(process, our_loader, loaded, ours, _answer_reader())

    @property
    def count(self) -> int:
        """Number of ranks of the replica, including the leader."""
        return len(self._ranks) + 1

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes, in rank order."""
        return tuple(rank.process.pid for rank in self._ranks)

    @property
    def sockets(self) -> list[socket.socket]:
        """Sockets that become readable when a rank ends or reports a failure."""
        return [rank.socket for rank in self._ranks]

    def send(self, order: Order, to: int | None = None) -> None:
        """Send an order to one rank, or to all.

        Raises:
            RankError: A rank is gone, or does not read.
        """
        data = frame(order)
        for rank in self._ranks if to is None else [self._ranks[to - 1]]:
            rank.socket.settimeout(STEP_TIMEOUT_S)  # a stopped rank does not read
            try:
                rank.socket.sendall(data)
            except OSError as error:
                raise self.failure(error) from error

    def wait_until(self, stage: type[Started] | type[WeightsLoaded]) -> None:
        """Wait until every rank has reported this stage."""
        until = time.monotonic() + LOAD_TIMEOUT_S
        while waiting := [rank.socket for rank in self._ranks if stage not in rank.reached]:
            left = until - time.monotonic()
            if not select.select(waiting, [], [], max(left, 0.0))[0]:
                raise RankError(f"a rank was not {stage.__name__} within {LOAD_TIMEOUT_S:.0f} s")
            self.check()

    def prepare(self, ref: AdapterRef, own: Callable[[], _T]) -> _T:
        """Return ``own()``, while every rank reads the adapter; call from one thread only.

        Raises:
            AdapterLoadError: ``own`` or a rank could not read it. Then no rank keeps it.
            RankError: A rank is gone.
        """
        self._send_to_loaders(Prepare(ref))
        try:
            prepared = own()
        except BaseException:
            self._problems(ref.digest)
            self._send_to_loaders(Drop(ref.digest))
            raise
        if problems := self._problems(ref.digest):
            self._send_to_loaders(Drop(ref.digest))
            raise AdapterLoadError(problems[0])
        return prepared

    def _send_to_loaders(self, order: LoaderOrder) -> None:
        data = frame(order)
        for number, rank in enumerate(self._ranks, 1):
            try:
                rank.loader.sendall(data)
            except OSError as error:
                raise RankError(f"rank {number} stopped reading adapters: {error}") from error

    def _problems(self, digest: str) -> list[str]:
        answers = [_prepared(number, rank, digest) for number, rank in enumerate(self._ranks, 1)]
        return [answer.problem for answer in answers if answer.problem]

    def check(self) -> None:
        """Read the reports of the ranks."""
        self._listen()
        if any(rank.closed or rank.failed for rank in self._ranks):
            raise self.failure()

    def _listen(self) -> None:
        for rank in self._ranks:
            while not rank.closed and select.select([rank.socket], [], [], 0)[0]:
                data = _receive(rank.socket)
                rank.closed = not data
                for answer in rank.reader.feed(data):
                    if isinstance(answer, Failed):
                        rank.failed = answer.message
                    else:
                        rank.reached.append(type(answer))

    def failure(self, cause: Exception | None = None) -> RankError:
        """Return an error that names the ranks that are gone, or else that one hangs.

        Other ranks may report that the group broke before the rank that broke it has ended.
        """
        until = time.monotonic() + 0.5  # a rank that breaks the group ends soon
        while True:
            self._listen()
            gone = [text for n, r in enumerate(self._ranks, 1) if (text := _end_of(n, r))]
            gone.sort(key=lambda text: GROUP_BROKE in text)  # the cause first
            if (gone and GROUP_BROKE not in gone[0]) or time.monotonic() > until:
                break
            time.sleep(0.02)
        if gone:
            return RankError("; ".join(gone))
        pids = ", ".join(map(str, self.pids))
        why = f" ({cause})" if cause is not None else ""
        return RankError(f"one of the ranks (pids {pids}) does not answer{why}")

    def close(self) -> None:
        """End the ranks and their connections."""
        for rank in self._ranks:
            rank.socket.close()
            rank.loader.close()
            rank.process.kill()  # it has no state to save
        for rank in self._ranks:
            rank.process.wait()


def _answer_reader() -> FrameReader[Answer]:
    return FrameReader(msgspec.msgpack.Decoder(list[Answer]))


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except OSError:
        return b""


def _prepared(number: int, rank: _Rank, digest: str) -> Prepared:
    """Return the answer to ``Prepare``, skipping abandoned answers to earlier orders."""
    while True:
        try:
            data = rank.loader.recv(1 << 16)
        except OSError as error:
            raise RankError(f"rank {number} does not read its adapter: {error}") from error
        if not data:
            raise RankError(f"rank {number} ended while it read an adapter")
        for answer in rank.loader_reader.feed(data):
            if answer.digest == digest:
                return answer


def _end_of(number: int, rank: _Rank) -> str:
    code = rank.process.poll()
    name = f"rank {number} (pid {rank.process.pid})"
    if rank.failed:
        return f"{name}: {rank.failed}"
    return f"{name} ended with code {code}" if code is not None else ""
