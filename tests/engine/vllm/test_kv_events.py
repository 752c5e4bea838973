"""KV events of vLLM become changes of Baton's index, by events that were recorded."""

from pathlib import Path

import msgspec
import pytest

from baton.engine.vllm.kv_events import REPLAY_END, CacheMirror, EventOrder
from baton.engine.vllm.zmtp import SUBSCRIBE_ALL, ZmtpPeer, message
from baton.types.block_hashes import block_hashes
from baton.types.errors import InternalError
from tests.engine.vllm.record import LONG, SEEDS

RECORDED = Path(__file__).parent / "recorded"
WHOLE = 192  # tokens of the recorded prompt in whole blocks of 32


def messages_in(name: str, kind: str, pieces: int = 1) -> list[list[bytes]]:
    peer = ZmtpPeer(kind)
    data = (RECORDED / name).read_bytes()
    size = -(-len(data) // pieces)
    return [m for at in range(0, len(data), size) for m in peer.feed(data[at : at + size])]


def replayed() -> list[tuple[int, bytes]]:
    parts = [found[-2:] for found in messages_in("replay.zmtp", "DEALER")]
    return [(int.from_bytes(number, "big", signed=True), payload) for number, payload in parts]


def test_the_live_stream_and_the_replay_have_the_same_batches() -> None:
    live = [
        (int.from_bytes(number, "big"), payload)
        for _, number, payload in messages_in("events.zmtp", "SUB")
    ]
    assert [*live, (REPLAY_END, b"")] == replayed()
    assert [number for number, _ in live] == list(range(len(live)))


@pytest.mark.parametrize("pieces", [2, 50, 3000])
def test_frames_may_arrive_in_any_pieces(pieces: int) -> None:
    assert messages_in("events.zmtp", "SUB", pieces) == messages_in("events.zmtp", "SUB")


def test_a_peer_without_zeromq_is_refused() -> None:
    with pytest.raises(InternalError, match="does not speak ZMTP"):
        ZmtpPeer("SUB").feed(b"HTTP/1.1 400 Bad Request\r\n".ljust(64))


def test_long_messages_have_long_frames() -> None:
    peer = ZmtpPeer("SUB")
    peer.feed((RECORDED / "events.zmtp").read_bytes()[:64])  # the greeting
    assert peer.feed(message(b"a", b"b" * 1000)) == [[b"a", b"b" * 1000]]
    assert SUBSCRIBE_ALL == b"\x00\x01\x01"


def test_blocks_of_two_tenants_have_the_hashes_of_their_seeds() -> None:
    mirror = CacheMirror()
    stored: list[bytes] = []
    held: set[bytes] = set()
    for number, payload in replayed():
        if number == REPLAY_END:
            break
        change = mirror.apply(payload)
        stored += change.stored
        held = (held | set(change.stored)) - set(change.removed)
    own = [block_hashes(seed, LONG[:WHOLE]) for seed in SEEDS]
    assert not set(own[0]) & set(own[1])
    assert set(stored) == {*own[0], *own[1]}
    assert held == set(own[0])  # the cache was reset, then the first tenant's prompt came again
    assert mirror.held_blocks == len(own[0])
    assert mirror.cached_tokens(block_hashes(SEEDS[0], LONG), 32) == WHOLE
    assert mirror.cached_tokens(block_hashes(SEEDS[1], LONG), 32) == 0


def stored_event(names: list[int], parent: int | None, tokens: list[int], salt: str) -> bytes:
    event = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 32,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [[salt] if parent is None else None, *[None] * (len(names) - 1)],
    }
    return msgspec.msgpack.encode([0.0, [event], 0])


def removed_event(*names: int) -> bytes:
    event = {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"}
    return msgspec.msgpack.encode([0.0, [event], 0])


def test_a_block_that_vllm_has_twice_is_held_until_both_are_gone() -> None:
    mirror = CacheMirror()
    salt = SEEDS[0].hex()
    assert len(mirror.apply(stored_event([1], None, LONG[:32], salt)).stored) == 2
    assert mirror.apply(stored_event([1], None, LONG[:32], salt)).stored == ()
    assert mirror.apply(removed_event(1)).removed == ()
    assert len(mirror.apply(removed_event(1)).removed) == 2
    assert mirror.held_blocks == 0


def test_blocks_with_other_names_in_vllm_may_be_one_in_the_index() -> None:
    mirror = CacheMirror()
    salt = SEEDS[0].hex()
    assert len(mirror.apply(stored_event([1], None, LONG[:32], salt)).stored) == 2
    assert mirror.apply(stored_event([2], None, LONG[:32], salt)).stored == ()
    assert mirror.apply(removed_event(1)).removed == ()
    assert len(mirror.apply(removed_event(2)).removed) == 2


def test_blocks_of_other_origins_are_not_in_the_index() -> None:
    mirror = CacheMirror()
    assert mirror.apply(stored_event([1], None, LONG[:32], "a salt of a stranger")).stored == ()
    assert mirror.apply(stored_event([2], 1, LONG[:32], "")).stored == ()
    assert mirror.apply(stored_event([4], 3, LONG[:32], "")).stored == ()
    assert mirror.apply(removed_event(1, 2, 9)).removed == ()


def test_a_block_behind_a_known_one_is_chained_to_it() -> None:
    mirror = CacheMirror()
    mirror.apply(stored_event([1], None, LONG[:32], SEEDS[0].hex()))
    found = mirror.apply(stored_event([2], 1, LONG[32:64], ""))
    assert list(found.stored) == block_hashes(SEEDS[0], LONG[:64])[2:]


def test_a_gap_is_requested_and_filled_in_order() -> None:
    order = EventOrder()
    assert order.missing_from == 0  # what was published before the subscription
    assert not order.replay_ended()
    assert order.live(0, b"a") == [b"a"]
    assert order.live(3, b"d") == []
    assert order.missing_from == 1
    assert order.replayed(0, b"a") == []  # again: dropped
    assert order.replayed(1, b"b") == [b"b"]
    assert order.replayed(2, b"c") == [b"c", b"d"]
    assert not order.replay_ended()
    assert order.missing_from is None
    assert order.live(4, b"e") == [b"e"]


def test_batches_that_vllm_no_longer_has_are_lost() -> None:
    order = EventOrder()
    order.replay_ended()
    assert order.live(5, b"f") == []
    assert order.missing_from == 0
    assert order.replayed(3, b"d") == []
    assert order.replayed(4, b"e") == []
    assert order.replay_ended()
    assert order.take_ready() == [b"d", b"e", b"f"]
