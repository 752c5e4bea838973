"""KV events of an attached server: used if they arrive, can be read, and are its own."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import zmq
import zmq.asyncio

from baton.engine.remote.attached import ServerFacts, UnfitServerError
from baton.engine.remote.http import HttpOrigin
from baton.engine.vllm import events_client
from baton.engine.vllm.attached import VllmServers, read_facts
from benchmarks.emulated_vllm import EmulatedServer, Emulation
from tests.fleet.attached.rig import neighbours

LIKE = Emulation(model="smol")
NO_FILES: Any = None


class Server(NamedTuple):
    """An emulated server, and where its events are."""

    origin: HttpOrigin
    facts: ServerFacts
    stream: str

    async def events(self, *streams: str) -> list[str]:
        """Return the named streams that are used."""
        named = [(stream, "") for stream in streams]
        kind = VllmServers(["smol"], NO_FILES)
        return [stream for stream, _ in await kind.events(self.origin, self.facts, named)]


@contextlib.asynccontextmanager
async def serving(**changes: Any) -> AsyncIterator[Server]:
    port = neighbours(changes.get("ranks", 1))
    server = EmulatedServer(replace(LIKE, events_port=port, **changes))
    origin = HttpOrigin.of_url(await server.start())
    try:
        facts = await read_facts(origin, ["smol"])
        yield Server(origin, facts, f"tcp://127.0.0.1:{port}")
    finally:
        await server.stop()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_client, "_ARRIVE_S", 0.3)


async def test_own_events_are_used() -> None:
    async with serving() as server:
        assert await server.events(server.stream) == [server.stream]
        assert await server.events() == []


async def test_events_of_another_server_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Prompts would go to a server because of what another one has cached."""
    async with serving() as server, serving() as other:
        assert await server.events(other.stream) == []
        assert f"no KV events of {server.origin.name} arrive from {other.stream}" in caplog.text
        assert await server.events(server.stream, other.stream) == []
        assert "has 1 data-parallel ranks, and 2 endpoints of KV events" in caplog.text


async def test_each_rank_has_its_own_events(caplog: pytest.LogCaptureFixture) -> None:
    """Streams in another order would send prompts to the rank that has not cached them."""
    async with serving(ranks=2) as server, serving() as other:
        second = f"tcp://127.0.0.1:{int(server.stream.rpartition(':')[2]) + 1}"
        assert await server.events(server.stream, second) == [server.stream, second]
        assert await server.events(second, server.stream) == []
        assert await server.events(server.stream, other.stream) == []
        assert f"arrive from {other.stream}" in caplog.text
        assert await server.events(server.stream) == []


async def test_a_port_that_accepts_and_never_speaks_is_not_used() -> None:
    """Nothing would ever be cached, for Baton."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        async with serving() as server:
            assert await server.events(f"tcp://127.0.0.1:{port}") == []


async def test_events_that_cannot_be_read_are_not_used() -> None:
    """They ended the worker, as often as it began anew. These are its own, in another format."""
    context = zmq.asyncio.Context()
    garbage = context.socket(zmq.PUB)
    port = garbage.bind_to_random_port("tcp://127.0.0.1")
    async with serving() as server:
        own = context.socket(zmq.SUB)
        own.subscribe(b"")
        own.connect(server.stream)

        async def garble() -> None:
            while True:
                topic, number, payload = await own.recv_multipart()
                await garbage.send_multipart([b"no number"])
                await garbage.send_multipart([topic, number, payload[:-1] + b"\xc1"])

        garbling = asyncio.create_task(garble())
        assert await server.events(f"tcp://127.0.0.1:{port}") == []
        garbling.cancel()
        await asyncio.wait([garbling])
    context.destroy(linger=0)


async def test_a_missing_package_is_named_if_events_are() -> None:
    async with serving() as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "baton.engine.vllm.events_client", None)
            with pytest.raises(UnfitServerError, match="events: "):
                await server.events(server.stream)


async def test_a_server_without_a_prefix_cache_is_not_asked() -> None:
    async with serving(missing=frozenset(["--no-enable-prefix-caching"])) as server:
        assert await server.events(server.stream) == []
