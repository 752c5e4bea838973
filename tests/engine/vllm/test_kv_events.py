"""KV events of vLLM become changes of Baton's index, by events that were recorded."""

from typing import Any

import msgspec

from baton.engine.vllm.kv_events import REPLAY_END, CachedBlocks, EventOrder, parts_of
from baton.types.block_hashes import block_hashes, seed_past_baton
from baton.types.images import PromptImage, hashed_tokens
from tests.engine.vllm.record import LONG, SEEDS, recorded_messages

WHOLE = 192  # tokens of the recorded prompt in whole blocks of 32


def replayed() -> list[tuple[int, bytes]]:
    return [
        (int.from_bytes(number, "big", signed=True), payload)
        for *_, number, payload in recorded_messages("replay")
    ]


def test_the_live_stream_and_the_replay_have_the_same_batches() -> None:
    live = [
        (int.from_bytes(number, "big"), payload)
        for _, number, payload in recorded_messages("events")
    ]
    assert [*live, (REPLAY_END, b"")] == replayed()
    assert [number for number, _ in live] == list(range(len(live)))


def test_blocks_of_two_tenants_have_the_hashes_of_their_seeds() -> None:
    cached = CachedBlocks()
    stored: list[bytes] = []
    held: set[bytes] = set()
    for number, payload in replayed():
        if number == REPLAY_END:
            break
        change = cached.apply(payload)
        stored += change.stored
        held = (held | set(change.stored)) - set(change.removed)
    own = [block_hashes(seed, LONG[:WHOLE]) for seed in SEEDS]
    assert not set(own[0]) & set(own[1])
    assert set(stored) == {*own[0], *own[1]}
    assert held == set(own[0])  # the cache was reset, then the first tenant's prompt came again
    assert cached.held_blocks == len(own[0])
    assert cached.cached_tokens(block_hashes(SEEDS[0], LONG), 32) == WHOLE
    assert cached.cached_tokens(block_hashes(SEEDS[1], LONG), 32) == 0


def stored_event(
    names: list[int], parent: int | None, tokens: list[int], salt: str | None
) -> bytes:
    own = [salt] if salt is not None else None
    event = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 32,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [own if parent is None else None, *[None] * (len(names) - 1)],
    }
    return msgspec.msgpack.encode([0.0, [event], 0])


def removed_event(*names: int, medium: str = "GPU") -> bytes:
    event = {"type": "BlockRemoved", "block_hashes": names, "medium": medium}
    return msgspec.msgpack.encode([0.0, [event], 0])


def test_a_block_that_vllm_has_twice_is_held_until_both_are_gone() -> None:
    cached = CachedBlocks()
    salt = SEEDS[0].hex()
    assert len(cached.apply(stored_event([1], None, LONG[:32], salt)).stored) == 2
    assert cached.apply(stored_event([1], None, LONG[:32], salt)).stored == ()
    assert cached.apply(removed_event(1)).removed == ()
    assert len(cached.apply(removed_event(1)).removed) == 2
    assert cached.held_blocks == 0


def offloaded_event(*names: int) -> bytes:
    """Return an event of vLLM's OffloadingConnector, which has no tokens."""
    event = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": None}
    event |= {"token_ids": [], "block_size": 0, "medium": "CPU", "group_idx": 0}
    return msgspec.msgpack.encode([0.0, [event], 0])


def test_blocks_in_host_memory_are_in_the_tier_of_the_index() -> None:
    cached = CachedBlocks(has_tier=True)
    salt = SEEDS[0].hex()
    whole = tuple(block_hashes(SEEDS[0], LONG[:32]))

    def tier(payload: bytes) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        (change,) = cached.apply(payload).tiers
        assert change.tier == "memory"
        return change.stored, change.removed

    assert tier(stored_event([1], None, LONG[:32], salt)) == (whole, ())
    assert tier(offloaded_event(1, 9)) == ((), ())
    assert (cached.tier_blocks, cached.held_blocks) == (1, 2)
    evicted = cached.apply(removed_event(1))
    assert (evicted.removed, evicted.tiers[0].removed) == (whole, ())
    assert cached.cached_tokens(whole, 32) == 0
    assert cached.apply(removed_event(1)).removed == ()
    back = cached.apply(stored_event([1], None, LONG[:32], salt))
    assert (back.stored, back.tiers[0].stored) == (whole, ())
    assert tier(removed_event(1, medium="CPU")) == ((), ())
    assert tier(removed_event(1)) == ((), whole)
    assert (cached.tier_blocks, cached.held_blocks) == (0, 0)
    cached.apply(stored_event([1], None, LONG[:32], salt))
    cached.apply(offloaded_event(1))
    cached.apply(removed_event(1))
    assert tier(removed_event(1, 9, medium="CPU")) == ((), whole)
    cached.apply(stored_event([2], None, LONG[:32], salt))
    cached.apply(offloaded_event(2))
    lost = cached.clear()
    assert set(lost.removed) == set(lost.tiers[0].removed) == set(whole)
    without = CachedBlocks()
    without.apply(stored_event([1], None, LONG[:32], salt))
    assert without.apply(offloaded_event(1)).tiers == ()


def test_blocks_with_other_names_in_vllm_may_be_one_in_the_index() -> None:
    cached = CachedBlocks()
    salt = SEEDS[0].hex()
    assert len(cached.apply(stored_event([1], None, LONG[:32], salt)).stored) == 2
    assert cached.apply(stored_event([2], None, LONG[:32], salt)).stored == ()
    assert cached.apply(removed_event(1)).removed == ()
    assert len(cached.apply(removed_event(2)).removed) == 2


def test_blocks_of_clients_past_baton_have_the_hashes_of_their_salts() -> None:
    cached = CachedBlocks()
    salted = cached.apply(stored_event([1], None, LONG[:32], "a salt of a client")).stored
    assert list(salted) == block_hashes(seed_past_baton(["a salt of a client"]), LONG[:32])
    plain = cached.apply(stored_event([5], None, LONG[:32], None)).stored
    assert list(plain) == block_hashes(seed_past_baton([]), LONG[:32])
    assert not set(plain) & set(salted)


def test_blocks_behind_unknown_ones_and_those_of_images_are_not_in_the_index() -> None:
    cached = CachedBlocks()
    assert cached.apply(stored_event([4], 3, LONG[:32], "")).stored == ()
    image: Any = ["digest of an image", 0]
    assert cached.apply(stored_event([6], None, LONG[:32], image)).stored == ()
    assert cached.apply(removed_event(4, 6, 9)).removed == ()


def test_blocks_of_an_image_have_the_hashes_of_its_prompt() -> None:
    """The image begins in the first block, and ends in the third."""
    image = PromptImage(b"", b"\x07" * 16, 20, 50, (9,))
    other = PromptImage(b"", b"\x08" * 16, 20, 50, (9,))
    salt = SEEDS[0].hex()
    whole = block_hashes(SEEDS[0], hashed_tokens(LONG[:96], [image]))
    assert whole[0] == block_hashes(SEEDS[0], LONG[:16])[0]
    assert whole[1] != block_hashes(SEEDS[0], LONG[:32])[1]
    assert whole[1:] != block_hashes(SEEDS[0], hashed_tokens(LONG[:96], [other]))[1:]
    event = msgspec.msgpack.decode(stored_event([1, 2, 3], None, LONG[:96], salt))
    for name in (image.name, f"an adapter:{image.name}"):  # vLLM may put an adapter before it
        keys = [[salt, [name, 20]], [[name, -12]], [[name, -44]]]
        event[1][0]["extra_keys"] = keys
        assert list(CachedBlocks().apply(msgspec.msgpack.encode(event)).stored) == whole


def test_a_block_behind_a_known_one_is_chained_to_it() -> None:
    cached = CachedBlocks()
    cached.apply(stored_event([1], None, LONG[:32], SEEDS[0].hex()))
    found = cached.apply(stored_event([2], 1, LONG[32:64], ""))
    assert list(found.stored) == block_hashes(SEEDS[0], LONG[:64])[2:]


def test_a_batch_may_replace_a_million_tokens() -> None:
    """It takes half a second; each hash was once compared with all of the batch (a minute)."""
    count = 31_250
    names = list(range(count))
    later = list(range(count, 2 * count))
    salt = SEEDS[0].hex()
    old, new = ([start, *range(1, 32 * count)] for start in (7, 8))
    cached = CachedBlocks()
    stored = cached.apply(stored_event(names, None, old, salt)).stored
    gone, come = (
        msgspec.msgpack.decode(batch)[1][0]
        for batch in (removed_event(*names), stored_event(later, None, new, salt))
    )
    change = cached.apply(msgspec.msgpack.encode([0.0, [gone, come], 0]))
    assert change.removed == stored == tuple(block_hashes(SEEDS[0], old))
    assert change.stored == tuple(block_hashes(SEEDS[0], new))


def test_a_batch_of_many_blocks_comes_in_parts_with_equal_names() -> None:
    """One of 200,000 blocks took 1.6 s of the loop."""
    names = list(range(5000))
    tokens = [number % 49_000 for number in range(16 * 5000)]
    events = [
        {"type": "BlockStored", "block_hashes": names, "parent_block_hash": None}
        | {"token_ids": tokens, "block_size": 16, "extra_keys": [[SEEDS[0].hex()], *[None] * 4999]},
        {"type": "BlockRemoved", "block_hashes": names[2500:]},
    ]
    payload = msgspec.msgpack.encode([0.0, events, 0])
    cached = CachedBlocks()
    changes = [cached.take(part) for part in parts_of(payload)]
    whole = CachedBlocks().apply(payload)
    stored = [name for change in changes for name in change.stored]
    removed = [name for change in changes for name in change.removed]
    assert max(len(change.stored) + len(change.removed) for change in changes) <= 2000
    assert (stored[:2500], set(stored[2500:])) == (list(whole.stored), set(removed))
    assert cached.held_blocks == 2500


def test_a_gap_is_requested_and_filled_in_order() -> None:
    order = EventOrder()
    assert (order.misses, order.next) == (True, 0)  # what was published before the subscription
    assert not order.replay_ended()
    assert order.live(0, b"a") == [b"a"]
    assert order.live(3, b"d") == []
    assert (order.misses, order.next) == (True, 1)
    assert order.replayed(0, b"a") == []  # again: dropped
    assert order.replayed(1, b"b") == [b"b"]
    assert order.replayed(2, b"c") == [b"c", b"d"]
    assert not order.replay_ended()
    assert not order.misses
    assert order.live(4, b"e") == [b"e"]


def test_batches_that_vllm_no_longer_has_are_lost() -> None:
    order = EventOrder()
    order.replay_ended()
    assert order.live(5, b"f") == []
    assert (order.misses, order.next) == (True, 0)
    assert order.replayed(3, b"d") == []
    assert order.replayed(4, b"e") == []
    assert order.replay_ended()
    assert order.take_ready() == [b"d", b"e", b"f"]
