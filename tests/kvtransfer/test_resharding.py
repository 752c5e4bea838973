"""Ranks with pools of their own: any width to any width, through the machines of both sides.

Each edge of the plan is a hand-off of its range of heads: a sender machine over a pool that has its
rank's heads only, a receiver machine over another such pool. What arrives is compared with the
whole model's KV, byte for byte.
"""

import dataclasses
from collections.abc import Iterator
from itertools import product

import msgspec
import numpy as np
import pytest

from engine.core.events import PromptDone, Published
from engine.core.geometry import KvGeometry
from engine.core.split import owned_heads
from kvtransfer import chunk, receiver, sender
from kvtransfer.kv_slice import KvSlice
from kvtransfer.receiver import HandoffReceiver
from kvtransfer.resharding import Edge, edges
from kvtransfer.sender import HandoffSender

WIDTHS = (1, 2, 3, 4, 8)
TOKENS = 69
BLOCKS = 5
LAYERS = 3
CLAIM = ("request", 1, 1, b"i" * 16)
BOUND = chunk.binding(*CLAIM)
Cell = tuple[int, int, int]  # layers of a rectangle (its first), block, head


def geometry(heads: int) -> KvGeometry:
    return KvGeometry(num_layers=LAYERS, num_kv_heads=heads, head_dim=4, num_blocks=8, dtype="bf16")


def model(heads: int) -> np.ndarray:
    """The KV of the prompt: [layer, k|v, block, token, head, bytes]."""
    shape = (*geometry(heads).shape[:2], BLOCKS, *geometry(heads).shape[3:5], 8)
    return np.random.default_rng(heads).integers(1, 256, shape, dtype=np.uint8)


class Rank:
    """A pool with a rank's heads, in pages of its own."""

    def __init__(self, rank: int, width: int, heads: int, seed: int) -> None:
        self.heads = owned_heads(rank, width, heads)
        self.geometry = geometry(len(self.heads))
        self.memory = bytearray(self.geometry.pool_bytes)
        self.data = np.frombuffer(self.memory, np.uint8).reshape(*self.geometry.shape[:-1], 8)
        self.view = chunk.PoolView(self.memory, self.geometry, self.heads[0])
        pages = np.random.default_rng([seed, rank]).permutation(self.geometry.num_blocks)
        self.pages = tuple(int(page) for page in pages[:BLOCKS])

    def fill(self, whole: np.ndarray) -> None:
        self.data[:, :, self.pages] = whole[..., list(self.heads), :]


def published() -> Iterator[Published]:
    """As prefill computes: chunk by chunk, a group of layers at a time."""
    for (block, count), (layer, layers) in product(((0, 3), (3, 2)), ((0, 2), (2, 1))):
        valid = min(TOKENS - block * 16, count * 16)
        yield Published(
            request_id="request",
            layer_begin=layer,
            layer_count=layers,
            block_begin=block,
            block_count=count,
            valid_tokens=valid,
        )


def hand_off(edge: Edge, theirs: Rank, ours: Rank) -> dict[Cell, bytes]:
    """One edge, to its commit; the digests that crossed it."""
    part = msgspec.structs.replace(theirs.geometry, num_kv_heads=edge.head_count)
    giving = HandoffSender(part, TOKENS, 0, 1 << 60, 0, first_head=edge.head_begin)
    giving.admitted(theirs.pages)
    taking = HandoffReceiver(part, TOKENS, frame_bytes=70_000, first_head=edge.head_begin)
    taking.reserved(1, 0, 0)
    actions = taking.accepted(resumed=False, now_ns=0)
    told = [action for event in published() for action in giving.published(event)]
    done = PromptDone(request_id="request", first=(), cached_tokens=0, queue_ns=0, prefill_ns=0)
    told += giving.prompt_done(done)
    said: dict[Cell, bytes] = {}
    committed = False
    for action in told:
        match action:
            case sender.Announce():
                actions += taking.published(action.kv_slice, 0)
            case sender.AnnounceCommit():
                record = (action.rectangles, action.payload_bytes, action.valid_tokens)
                actions += taking.commit_record(*record, action.manifest)
    while actions:
        match actions.pop(0):
            case receiver.Bind():
                actions += taking.bound(1, ours.pages)
            case receiver.Pull(kv_slices, epoch):
                assert not committed
                for kv_slice in kv_slices:
                    assert giving.may_read(kv_slice)
                    assert taking.frame_arrived(kv_slice, epoch)
                    said.update(move(kv_slice, theirs, ours))
                    actions += taking.frame_stored(kv_slice, epoch, 0)
            case receiver.Commit():
                committed = True
            case receiver.AskForPeer(reason):
                pytest.fail(reason)
    assert committed
    return said


def move(kv_slice: KvSlice, theirs: Rank, ours: Rank) -> dict[Cell, bytes]:
    payload = memoryview(bytearray(kv_slice.payload_bytes(theirs.geometry)))
    digests = theirs.view.copy_out(theirs.pages, kv_slice, BOUND, payload)
    assert ours.view.place(ours.pages, kv_slice, BOUND, payload, digests)
    cells = product(range(kv_slice.block_count), range(kv_slice.head_count))
    return {
        (kv_slice.layer_begin, kv_slice.block_begin + block, kv_slice.head_begin + head): digests[
            8 * number : 8 * number + 8
        ]
        for number, (block, head) in enumerate(cells)
    }


@pytest.mark.parametrize("heads", WIDTHS)
def test_every_width_to_every_width_brings_the_same_bytes_and_digests(heads: int) -> None:
    whole = model(heads)
    last = TOKENS % 16
    digests_of_all: list[dict[Cell, bytes]] = []
    for senders, receivers in product(WIDTHS, WIDTHS):
        giving = [Rank(rank, senders, heads, 1) for rank in range(senders)]
        taking = [Rank(rank, receivers, heads, 2) for rank in range(receivers)]
        for rank in giving:
            rank.fill(whole)
        digests: dict[Cell, bytes] = {}
        for edge in edges(senders, receivers, heads):
            said = hand_off(edge, giving[edge.sender], taking[edge.receiver])
            assert all(digests.get(cell, digest) == digest for cell, digest in said.items())
            digests |= said
        digests_of_all.append(digests)
        for rank in taking:
            got, want = rank.data[:, :, rank.pages], whole[..., list(rank.heads), :].copy()
            want[:, :, -1, last:] = 0  # behind the prompt's last token nothing is sent
            assert (got == want).all()
            others = [page for page in range(8) if page not in rank.pages]
            assert not rank.data[:, :, others].any()
    assert all(digests == digests_of_all[0] for digests in digests_of_all)
    assert len(digests_of_all[0]) == 2 * BLOCKS * heads, "every (layers, block, head)"


def test_an_edge_takes_no_head_of_another() -> None:
    machine = HandoffReceiver(geometry(2), TOKENS, first_head=2)
    machine.reserved(1, 0, 0)
    machine.accepted(resumed=False, now_ns=0)
    inside = KvSlice(0, LAYERS, 2, 2, 0, BLOCKS, TOKENS)
    for wrong in (dataclasses.replace(inside, head_begin=h, head_count=2) for h in (0, 1, 3)):
        assert not HandoffSender(geometry(2), TOKENS, 0, 1, 0, first_head=2).may_read(wrong)
        other = HandoffReceiver(geometry(2), TOKENS, first_head=2)
        other.reserved(1, 0, 0)
        other.accepted(resumed=False, now_ns=0)
        (_, ask) = other.published(wrong, 0)
        assert isinstance(ask, receiver.AskForPeer)
    assert machine.published(inside, 0) == [receiver.Bind(1)]
