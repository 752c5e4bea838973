"""A rank that waits for its leader, and what strangers say on its port meanwhile."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest

from baton.engine.cpu.parallel.rank_sockets import Hello, RankAddress, connect, greet
from baton.engine.ipc import LENGTH
from baton.engine.settings import EngineSettings
from baton.wire.fleet_token import FleetToken
from baton.wire.grpc_channels import Channels
from fleet.worker import rank
from kvtransfer.ranks.link import RankLink
from tests.kvtransfer.test_transports import until

STORE = "tcp://127.0.0.1:1"


@dataclass
class Waiting:
    """A rank's program whose engine is only written down."""

    address: RankAddress
    ended: "asyncio.Future[int]"
    started: list[tuple[list[str], Sequence[int]]] = field(default_factory=list)

    def lead(self) -> list[socket.socket]:
        """What the leader's engine does."""
        links = []
        for _ in range(2):
            link = connect(self.address, 5)
            greet(link, self.address, STORE)
            links.append(link)
        return links


class Engine:
    pid, returncode = 1, 0

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0


@pytest.fixture
async def waiting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Waiting]:
    async with rank.running(rank.RankSettings(fleet_token="t")) as (address, ended):
        channels = Channels()
        link = RankLink(1, address, channels.to(address), FleetToken("t"))
        settings = msgspec.json.encode(EngineSettings(model="none"))
        # as the leader says it; the fixture is its shell
        link._send(begin=rank.rank_pb2.RankBegin(rank=1, engine_settings=settings))
        listens = await link._until(link._listens)
        place = RankAddress("127.0.0.1", listens.port, listens.secret)
        found = Waiting(place, ended)

        async def note(*command: str, pass_fds: Sequence[int], env: object) -> Engine:
            names = [socket.socket(fileno=socket.dup(fd)) for fd in pass_fds[:2]]
            ports = []
            for name in names:
                with name:
                    ports.append(name.getpeername()[1])
            found.started.append((list(command), ports))
            return Engine()

        monkeypatch.setattr(asyncio, "create_subprocess_exec", note)
        yield found
        await link.close()
        await channels.close()


def said(hello: bytes) -> bytes:
    return LENGTH.pack(len(hello)) + hello


GARBAGE = {
    "letters that are not ASCII": said(msgspec.msgpack.encode(Hello("é", STORE))),
    "another secret": said(msgspec.msgpack.encode(Hello("guess", STORE))),
    "no UTF-8": said(b"\x82\xa6secret\xa1\xff\xa5store\xa0"),
    "nested": said(b"\x82\xa6secret" + b"\x91" * 4000),
    "nested in a field that nobody knows": said(b"\x81\xa1x" + b"\x91" * 4000),
    "nothing": said(b""),
    "half": said(msgspec.msgpack.encode(Hello("guess", STORE)))[:-3],
    "too long": LENGTH.pack(0xFFFFFFFF) + b"x" * 5000,
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
async def test_garbage_ends_its_connection_and_the_leader_is_let_in(
    waiting: Waiting, garbage: bytes
) -> None:
    with connect(waiting.address, 5) as stranger:
        stranger.sendall(garbage)
        with contextlib.suppress(OSError):
            stranger.shutdown(socket.SHUT_WR)
        links = waiting.lead()
        await until(lambda: waiting.started or waiting.ended.done())
        assert not waiting.ended.done()
        ((command, ports),) = waiting.started
        assert STORE in command
        assert ports == [link.getsockname()[1] for link in links], "orders first, then adapters"
    for link in links:
        link.close()


async def test_the_leader_does_not_wait_behind_the_silent(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as undo:
        for _ in range(12):  # one after the other they would take a minute
            undo.enter_context(connect(waiting.address, 5))
        for link in waiting.lead():
            undo.enter_context(link)
        await until(lambda: waiting.started or waiting.ended.done())
        assert not waiting.ended.done()
        assert waiting.started
