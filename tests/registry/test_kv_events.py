"""The prefix index: what workers publish is what readers hold, whatever happens to Redis."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.registry.event_feed import FeedMachine
from baton.registry.event_streams import STREAMS
from baton.registry.kv_events import HashLedger, KvEventPublisher
from baton.registry.redis_store import Registry
from baton.registry.types import EventBatch, Forget, Snapshot, hashes_checksum, split_hashes
from fleet.local.redis_server import EmbeddedRedis
from tests.registry.conftest import Reader, eventually
from tests.soak import examples


def stream_of(incarnation: bytes) -> str:
    return f"baton:{{test}}:kv:events:{incarnation[0] % STREAMS}"


def hashes(count: int) -> list[bytes]:
    return [secrets.token_bytes(16) for _ in range(count)]


@pytest.fixture
async def publisher(registry: Registry) -> AsyncIterator[KvEventPublisher]:
    made = KvEventPublisher(registry, secrets.token_bytes(16))
    made.start()
    yield made
    await made.stop()


def raw(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url)


async def test_what_is_stored_and_removed_reaches_a_reader(
    publisher: KvEventPublisher, reader: Reader
) -> None:
    held = hashes(5000)  # more than fits into one batch
    publisher.publish(stored=held)
    publisher.publish(removed=held[:10])
    await eventually(lambda: list(reader.hashes.values()) == [set(held[10:])])
    assert reader.feed.gaps == 0


async def test_a_reader_that_comes_late_starts_with_a_snapshot(
    publisher: KvEventPublisher, registry: Registry
) -> None:
    held = hashes(100)
    publisher.publish(stored=held)
    await eventually(lambda: publisher.sequence > 0 and publisher._registry.connected)
    late = Reader(registry)
    await eventually(lambda: list(late.hashes.values()) == [set(held)])
    assert isinstance(late.items[0], Snapshot)
    await late.close()


async def test_many_publishers_at_once_do_not_disturb_each_other(
    registry: Registry, reader: Reader
) -> None:
    publishers = [KvEventPublisher(registry, secrets.token_bytes(16)) for _ in range(6)]
    expected: dict[bytes, set[bytes]] = {}
    for publisher in publishers:
        publisher.start()
    for _ in range(20):
        for publisher in publishers:
            held = expected.setdefault(publisher._ledger.incarnation, set())
            new = hashes(20)
            gone = list(held)[:5]
            publisher.publish(stored=new, removed=gone)
            held.difference_update(gone)
            held.update(new)
        await asyncio.sleep(0.01)
    await eventually(lambda: reader.hashes == expected)
    await asyncio.gather(*(publisher.stop() for publisher in publishers))


async def test_redis_killed_and_restarted_empty_is_filled_again(
    redis_server: EmbeddedRedis, publisher: KvEventPublisher, reader: Reader
) -> None:
    held = hashes(50)
    publisher.publish(stored=held)
    await eventually(lambda: list(reader.hashes.values()) == [set(held)])

    redis_server.kill()
    more = hashes(5)
    publisher.publish(stored=more, removed=held[:1])  # while it is away: nothing raises
    await eventually(
        lambda: not publisher._registry.connected and not reader.feed._registry.connected
    )
    assert list(reader.hashes.values()) == [set(held)], "the index serves on"

    redis_server.start()
    await eventually(lambda: list(reader.hashes.values()) == [{*held[1:], *more}])
    assert not any(isinstance(item, Forget) for item in reader.items)
    assert not reader.task.done()


async def test_a_set_that_redis_evicted_is_published_again(
    redis_server: EmbeddedRedis, publisher: KvEventPublisher, registry: Registry
) -> None:
    held = hashes(50)
    publisher.publish(stored=held)
    await eventually(lambda: publisher._ledger.checksum == hashes_checksum(held))
    with raw(redis_server) as client:
        for key in client.keys("*:log") + client.keys("*:blocks"):
            client.delete(key)
        await eventually(lambda: client.keys("*:blocks"))
        (key,) = client.keys("*:blocks")
        assert set(split_hashes(client.lindex(key, 0))) == set(held)


async def test_a_long_log_is_folded_and_readers_need_not_know(
    redis_server: EmbeddedRedis, publisher: KvEventPublisher, reader: Reader, monkeypatch
) -> None:
    monkeypatch.setattr("baton.registry.kv_events.MAX_LOG_BATCHES", 3)
    held = set()
    for _ in range(12):
        new = hashes(5)
        publisher.publish(stored=new, removed=sorted(held)[:2])
        held = (held - set(sorted(held)[:2])) | set(new)
        sequence = publisher.sequence
        await eventually(lambda sequence=sequence: publisher.sequence > sequence)
    await eventually(lambda: list(reader.hashes.values()) == [held])
    assert reader.feed.gaps == 0
    with raw(redis_server) as client:
        await eventually(lambda: all(client.llen(key) <= 4 for key in client.keys("*:log")))
        assert len(client.keys("*:blocks")) == 1
    answer = await reader.feed._registry.blocks.snapshot(publisher._ledger.incarnation)
    assert answer is not None
    assert answer[0].hashes == held
    assert answer[0].checksum == answer[1]


async def test_what_a_log_holds_is_in_the_snapshot(registry: Registry) -> None:
    first, second = hashes(9), hashes(4)
    await registry.blocks.publish_snapshot(
        Snapshot(incarnation=b"i" * 16, sequence=1, packed=b"".join(first)), 0
    )
    for number, batch in enumerate(((first[:0], first[:3]), (second, first[3:4])), 2):
        stored, removed = batch
        await registry.blocks.publish(
            EventBatch(
                incarnation=b"i" * 16,
                sequence=number,
                stored=tuple(stored),
                removed=tuple(removed),
            ),
            0,
        )
    answer = await registry.blocks.snapshot(b"i" * 16)
    assert answer is not None
    assert (answer[0].sequence, answer[0].hashes) == (3, {*first[4:], *second})
    assert await registry.blocks.refresh(b"i" * 16) == (3, 0, 1, 2)


async def test_events_lost_from_a_trimmed_stream_are_noticed(
    redis_server: EmbeddedRedis, publisher: KvEventPublisher, reader: Reader
) -> None:
    held = hashes(10)
    publisher.publish(stored=held)
    await eventually(lambda: list(reader.hashes.values()) == [set(held)])
    reader.feed._registry, registry = (
        Registry("redis://127.0.0.1:1/0", "test"),
        reader.feed._registry,
    )
    await eventually(lambda: not reader.feed._registry.connected)
    lost = hashes(3)
    stream = stream_of(publisher._ledger.incarnation)
    with raw(redis_server) as client:
        for name in lost:
            before = client.xlen(stream)
            publisher.publish(stored=[name])
            await eventually(lambda before=before: client.xlen(stream) > before)
        client.xtrim(stream, maxlen=1, approximate=False)
    reader.feed._registry = registry
    await eventually(lambda: list(reader.hashes.values()) == [{*held, *lost}])
    assert reader.feed.gaps == 1


async def test_a_mirror_that_differs_by_checksum_is_read_again(
    publisher: KvEventPublisher, reader: Reader
) -> None:
    publisher.publish(stored=hashes(4))
    await eventually(lambda: len(reader.hashes) == 1 and bool(*reader.hashes.values()))
    (incarnation,) = reader.hashes
    reader.feed._machine._tracks[incarnation].checksum ^= 1
    reader.items.clear()
    await eventually(lambda: any(isinstance(item, Snapshot) for item in reader.items))


async def test_a_dead_incarnation_is_forgotten_at_once(
    redis_server: EmbeddedRedis, registry: Registry, publisher: KvEventPublisher, reader: Reader
) -> None:
    publisher.publish(stored=hashes(200))
    await eventually(lambda: len(reader.hashes) == 1)
    await publisher.stop()
    await registry.blocks.forget(*reader.hashes)
    await eventually(lambda: not reader.hashes)
    with raw(redis_server) as client:
        assert not client.keys("*:blocks") and not client.keys("*:mark")
        assert client.zcard("baton:{test}:kv:live") == 0


async def test_the_marks_of_many_workers_are_read_some_at_a_time(
    redis_server: EmbeddedRedis, registry: Registry
) -> None:
    """The marks of a thousand workers in one go once held a router's loop."""
    many = [number.to_bytes(16, "big") for number in range(300)]
    with raw(redis_server) as client:
        pipe = client.pipeline()
        for number, one in enumerate(many):
            pipe.zadd("baton:{test}:kv:live", {one: 1})
            if number != 7:
                pipe.set(f"baton:{{test}}:kv:{one.hex()}:mark", f"{number} {number + 1}")
        pipe.execute()
    parts = [part async for part in registry.blocks.marks(await registry.blocks.refreshes())]
    assert len(parts) == 3 and max(map(len, parts)) <= 128
    read = {one: mark for part in parts for one, mark in part.items()}
    assert read == {one: (n, n + 1) for n, one in enumerate(many) if n != 7}
    with raw(redis_server) as client:
        assert client.zscore("baton:{test}:kv:live", many[7]) is None, "it had expired"


def away(reader: Reader) -> Registry:
    """Takes the reader's connection; the answer gives it back."""
    kept = reader.feed._registry
    reader.feed._registry = Registry("redis://127.0.0.1:1/0", "test")
    return kept


async def publish_one_by_one(publisher: KvEventPublisher, names: list[bytes]) -> None:
    """A batch for each: as many entries of the stream."""
    ledger, registry = publisher._ledger, publisher._registry
    await publisher.stop()
    for name in names:
        ledger.change(stored=[name])
        await registry.blocks.publish(ledger.take_batch(), ledger.checksum)
    publisher.start()


async def test_a_reader_that_was_away_for_less_than_is_kept_has_missed_nothing(
    publisher: KvEventPublisher, reader: Reader
) -> None:
    """4,096 entries were kept of all workers together: a thousand busy ones fill that in 0.1 s."""
    publisher.publish(stored=hashes(10))
    await eventually(lambda: len(reader.hashes) == 1 and bool(*reader.hashes.values()))
    registry = away(reader)
    await eventually(lambda: not reader.feed._registry.connected)
    await publish_one_by_one(publisher, hashes(4500))
    reader.items.clear()
    reader.feed._registry = registry
    await eventually(lambda: list(reader.hashes.values()) == [publisher._ledger.hashes])
    assert not any(isinstance(item, Snapshot) for item in reader.items)
    assert reader.feed.gaps == 0


async def test_a_reader_that_was_away_for_longer_reads_a_snapshot(
    redis_server: EmbeddedRedis, publisher: KvEventPublisher, reader: Reader, monkeypatch
) -> None:
    monkeypatch.setattr("baton.registry.event_streams.KEEP_S", 1.0)
    publisher.publish(stored=hashes(10))
    await eventually(lambda: len(reader.hashes) == 1 and bool(*reader.hashes.values()))
    registry = away(reader)
    await eventually(lambda: not reader.feed._registry.connected)
    await publish_one_by_one(publisher, hashes(300))
    await asyncio.sleep(1.2)
    await publish_one_by_one(publisher, hashes(300))
    with raw(redis_server) as client:
        assert 300 <= client.xlen(stream_of(publisher._ledger.incarnation)) < 450, "old ones went"
    reader.items.clear()
    reader.feed._registry = registry
    await eventually(lambda: list(reader.hashes.values()) == [publisher._ledger.hashes])
    assert sum(isinstance(item, Snapshot) for item in reader.items) == 1
    assert reader.feed.gaps == 1


async def test_streams_take_no_more_memory_than_they_may(
    redis_server: EmbeddedRedis, registry: Registry, monkeypatch
) -> None:
    monkeypatch.setattr("baton.registry.event_streams.STREAM_BYTES", 1 << 20)
    incarnation = secrets.token_bytes(16)
    for number in range(1, 401):
        batch = EventBatch(incarnation=incarnation, sequence=number, stored=tuple(hashes(500)))
        await registry.blocks.publish(batch, 0)
    stream = stream_of(incarnation)
    with raw(redis_server) as client:
        assert client.memory_usage(stream) > 3 << 20
        await registry.blocks.refresh(incarnation)
        assert client.memory_usage(stream) < 1.3 * (1 << 20)
        (last,) = client.xrevrange(stream, count=1)
        assert last[1][b"n"] == b"400"
        unbounded = [key for key in client.keys("*") if client.ttl(key) < 0]
        assert set(unbounded) == {stream.encode(), b"baton:{test}:kv:live"}


NAMES = [bytes([n]) * 16 for n in range(12)]
CHANGES = st.lists(
    st.tuples(
        st.lists(st.sampled_from(NAMES), max_size=6),
        st.lists(st.sampled_from(NAMES), max_size=6),
        st.sampled_from(["deliver", "lose", "trim", "redis empty", "hold"]),
    ),
    max_size=25,
)


@settings(max_examples=examples(200), deadline=None)
@given(CHANGES)
def test_reader_and_worker_agree_after_any_losses(
    changes: list[tuple[list[bytes], list[bytes], str]],
) -> None:
    """Model: a ledger publishes into a channel that loses things; heartbeats heal the reader."""
    ledger, machine = HashLedger(b"i" * 16), FeedMachine()
    machine.wants.add(ledger.incarnation)
    index: set[bytes] = set()
    truth: set[bytes] = set()
    stored_set: set[bytes] = set()  # what Redis holds

    def apply(items: list[object]) -> None:
        for item in items:
            if isinstance(item, Snapshot):
                index.clear()
                index.update(item.hashes)
            elif isinstance(item, EventBatch):
                assert not index.intersection(item.stored), "batches hold net changes only"
                index.difference_update(item.removed)
                index.update(item.stored)

    def publish() -> EventBatch | None:
        if ledger.needs_snapshot:
            stored_set.clear()
            stored_set.update(ledger.take_snapshot().hashes)
            return None
        batch = ledger.take_batch()
        stored_set.difference_update(batch.removed)
        stored_set.update(batch.stored)
        return batch

    def heal() -> None:
        apply(machine.on_marks({ledger.incarnation: (ledger.sequence, ledger.checksum)}))
        if machine.wants:
            snapshot = Snapshot(
                incarnation=ledger.incarnation,
                sequence=ledger.sequence,
                packed=b"".join(stored_set),
            )
            apply(machine.on_snapshot(snapshot, ledger.checksum))

    for stored, removed, fate in changes:
        ledger.change(stored, removed)
        truth.difference_update(removed)
        truth.update(stored)
        if fate == "hold":
            continue
        if fate == "redis empty":
            ledger.lost()
            stored_set.clear()
        while ledger.pending:
            batch = publish()
            if batch is not None and fate == "deliver":
                apply(machine.on_entry(batch))
                apply(machine.on_entry(batch))  # twice is as good as once
        if fate == "trim":
            heal()
        assert stored_set == ledger.hashes

    while ledger.pending:
        publish()
    heal()
    assert index == ledger.hashes == truth
    assert ledger.taken_hashes == len(truth)


def test_changes_that_undo_each_other_publish_nothing() -> None:
    ledger = HashLedger(b"i" * 16)
    ledger.change(stored=NAMES[:2])
    ledger.change(removed=NAMES[:2])
    assert not ledger.pending


def test_a_snapshot_of_an_incarnation_that_is_gone_is_not_asked_for_forever() -> None:
    machine = FeedMachine()
    machine.on_entry(EventBatch(incarnation=b"x" * 16, sequence=5))
    machine.on_absent((), 0.0)
    machine.on_absent((), 9.0)
    assert machine.wants == {b"x" * 16}  # it may be about to say that it is alive
    machine.on_absent((), 10.0)
    assert not machine.wants


async def test_a_reader_that_lost_what_it_was_told_gets_it_again(
    publisher: KvEventPublisher, reader: Reader
) -> None:
    held = hashes(4)
    publisher.publish(stored=held)
    await eventually(lambda: list(reader.hashes.values()) == [set(held)])
    (incarnation,) = reader.hashes
    reader.hashes.clear()
    reader.feed.want(incarnation)
    await eventually(lambda: reader.hashes == {incarnation: set(held)})
