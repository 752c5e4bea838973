"""Connections to vLLM's sockets with KV events, beside a publisher in this process."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from baton.engine.vllm import events_client
from baton.engine.vllm.events_client import EventPrefixes, KvEventsClient
from baton.engine.vllm.ranks import RankedPrefixes
from baton.types.errors import InternalError
from baton.types.events import CacheChanged
from tests.engine.vllm.record import recorded_messages


class Publisher:
    """Sockets of one vLLM, and a client of them."""

    def __init__(self, folder: Path, context: zmq.asyncio.Context) -> None:
        self.events = context.socket(zmq.XPUB)
        self.events.bind(f"ipc://{folder}/events")
        self.replay = context.socket(zmq.ROUTER)
        self.replay.bind(f"ipc://{folder}/replay")
        self.changes: list[CacheChanged] = []
        self.client = KvEventsClient(f"ipc://{folder}/events", f"ipc://{folder}/replay")
        self.client.on_change = self.changes.append
        self.reading = asyncio.create_task(self.client.run())
        self.filling = asyncio.create_task(self.client.fill_gaps())

    async def answer(self, parts: list[list[bytes]]) -> int:
        """Answer a replay request; return the number from which it asks."""
        client, _, number = await self.replay.recv_multipart()
        for part in parts:
            await self.replay.send_multipart([client, *part])
        return int.from_bytes(number, "big")

    async def close(self) -> None:
        for task in (self.reading, self.filling):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, InternalError):
                await task
        self.client.close()


@pytest.fixture
async def publisher(tmp_path: Path) -> AsyncIterator[Publisher]:
    context = zmq.asyncio.Context()
    publisher = Publisher(tmp_path, context)
    async with asyncio.timeout(20):
        assert await publisher.events.recv() == b"\x01"  # the subscription
        yield publisher
    await publisher.close()
    context.destroy(linger=0)


async def test_a_gap_in_the_stream_is_filled_by_a_replay(
    publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    first, _, third = recorded_messages("events")
    replay = recorded_messages("replay")
    assert await publisher.answer(replay[-1:]) == 0  # what came before the subscription
    await publisher.events.send_multipart(first)
    await publisher.events.send_multipart(third)
    assert await publisher.answer(replay[1:]) == 1
    while len(publisher.changes) < 3:
        await asyncio.sleep(0.005)
    assert not caplog.messages


async def test_events_come_from_an_ipv6_address() -> None:
    context = zmq.asyncio.Context()
    events = context.socket(zmq.XPUB)
    events.ipv6 = True
    port = events.bind_to_random_port("tcp://[::1]")
    client = KvEventsClient(f"tcp://[::1]:{port}", "")
    reading = asyncio.create_task(client.run())
    try:
        async with asyncio.timeout(5):
            assert await events.recv() == b"\x01"  # the subscription
    finally:
        reading.cancel()
        await asyncio.wait([reading])
        client.close()
        context.destroy(linger=0)


async def test_a_replay_that_stops_is_requested_again(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events_client, "_REPLAY_S", 0.2)
    replay = recorded_messages("replay")
    await publisher.answer(replay[-1:])
    _, second, third = recorded_messages("events")
    await publisher.events.send_multipart(third)
    await publisher.answer(replay[:1])
    while not caplog.messages:
        await asyncio.sleep(0.005)
    assert "does not repeat its KV events from number 0 on" in caplog.messages[0]
    assert await publisher.answer(replay[1:]) == 1  # what the first try brought stays
    while len(publisher.changes) < 3:
        await asyncio.sleep(0.005)
    assert second[-1] == replay[1][-1]


async def test_a_replay_that_never_comes_holds_no_batches_back(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An endpoint behind a firewall froze the index, and held all batches for ever."""
    monkeypatch.setattr(events_client, "_REPLAY_S", 0.1)
    await publisher.answer(recorded_messages("replay")[-1:])
    topic, _, payload = recorded_messages("events")[0]
    await publisher.events.send_multipart([topic, (57).to_bytes(8, "big"), payload])
    while not (publisher.changes and publisher.changes[-1].stored):
        await asyncio.sleep(0.01)
    assert not publisher.client._order.misses
    assert [message.split()[0] for message in caplog.messages] == ["vLLM", "vLLM", "KV"]


def stored(*tokens: int) -> bytes:
    event = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None}
    return msgspec.msgpack.encode([0.0, [{**event, "token_ids": tokens, "block_size": 16}], 0])


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\x93\xcb",
        b"[]",
        stored(*range(15)),
        stored(*[-1] * 16),
        stored(*[1 << 40] * 16),
        stored(*[1 << 16] * (1 << 20)),
    ],
)
async def test_events_of_an_unknown_format_end_the_worker(
    publisher: Publisher, damaged: bytes
) -> None:
    await publisher.events.send_multipart([b"", bytes(8), damaged])
    with pytest.raises(InternalError, match="KV events of an unknown format"):
        await publisher.reading


def test_a_missing_package_is_named_with_its_extra() -> None:
    program = "import sys; sys.modules['zmq'] = None; import baton.engine.vllm.events_client"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.endswith("pip install 'baton-serve[vllm]'\n")


async def test_without_a_replay_what_was_missed_stays_unknown(tmp_path: Path) -> None:
    """The first batches came before the subscription; the later ones are used."""
    batches = recorded_messages("events")
    changes: list[CacheChanged] = []
    client = KvEventsClient(f"ipc://{tmp_path}/events", "")
    client.on_change = changes.append
    context = zmq.asyncio.Context()
    with context.socket(zmq.XPUB) as events:
        events.bind(f"ipc://{tmp_path}/events")
        tasks = [asyncio.create_task(work) for work in (client.run(), client.fill_gaps())]
        async with asyncio.timeout(20):
            await events.recv()
            topic, _, payload = batches[0]
            await events.send_multipart([topic, (57).to_bytes(8, "big"), payload])
            while not changes or not changes[-1].stored:
                await asyncio.sleep(0.01)
    assert client.cached.held_blocks == len(changes[-1].stored)
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    client.close()
    context.destroy(linger=0)


def test_blocks_of_several_ranks_are_stored_by_the_first_and_removed_by_the_last() -> None:
    changes: list[CacheChanged] = []
    clients = [KvEventsClient("ipc://none", "") for _ in range(2)]
    make = lambda rank, on_change: EventPrefixes(clients[rank], 32, on_change)  # noqa: E731
    prefixes = RankedPrefixes(2, make, changes.append)
    payload = next(parts[2] for parts in recorded_messages("events") if b"BlockStored" in parts[2])
    for client in clients:
        client.on_change(client.cached.apply(payload))
    (stored,) = changes
    assert stored.stored
    assert prefixes.held_blocks == 2 * len(stored.stored)
    clients[0].on_change(clients[0].cached.clear())
    assert changes == [stored]
    clients[1].on_change(clients[1].cached.clear())
    assert set(changes[-1].removed) == set(stored.stored)
    prefixes.close()
