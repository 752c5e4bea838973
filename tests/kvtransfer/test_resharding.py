"""Ranks with pools of their own: any width to any width, through the machines of both sides.

The sender machine announces each rank's heads for themselves, the receiver machine asks for frames
that lie in one rank's pool on both sides. What arrives in each pool is compared with the whole
model's KV, byte for byte.
"""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from batonpb import prefill_pb2 as pb

from baton.engine.core.split import owned_heads, rank_geometries
from baton.types.events import PromptDone, Published
from baton.types.geometry import KvGeometry
from kvtransfer import chunk, receiver_actions, sender
from kvtransfer.kv_slice import KvSlice
from kvtransfer.rank_pools import RankPools
from kvtransfer.receiver import HandoffReceiver, ReceiverState
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


class Replica:
    """Ranks without a byte in common, whose pages have the same numbers."""

    def __init__(self, width: int, heads: int, seed: int) -> None:
        shapes = rank_geometries(geometry(heads), width)
        self.memory = [bytearray(shape.pool_bytes) for shape in shapes]
        self.heads = [owned_heads(rank, width, heads) for rank in range(width)]
        self.data = [
            np.frombuffer(memory, np.uint8).reshape(*shape.shape[:-1], 8)
            for memory, shape in zip(self.memory, shapes, strict=True)
        ]
        self.pools = RankPools(self.memory, geometry(heads))
        pages = np.random.default_rng(seed).permutation(geometry(heads).num_blocks)
        self.pages = tuple(int(page) for page in pages[:BLOCKS])

    def fill(self, whole: np.ndarray) -> None:
        for data, own in zip(self.data, self.heads, strict=True):
            data[:, :, self.pages] = whole[..., list(own), :]


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


def over_the_wire(kv_slice: KvSlice, heads: int) -> KvSlice:
    """What decode reads of an announcement."""
    data = kv_slice.to_published(heads).SerializeToString()
    return KvSlice.from_published(pb.Published.FromString(data), heads)


def open_receiver(taking: Replica, heads: int) -> HandoffReceiver:
    parts = taking.pools.parts
    machine = HandoffReceiver(geometry(heads), TOKENS, frame_bytes=70_000, parts=parts)
    machine.reserved(1, 0, 0)
    machine.accepted(resumed=False, now_ns=0)
    return machine


def tell_all(giving: Replica, machine: HandoffReceiver, heads: int) -> HandoffSender:
    """Everything is published, and prefill's commit record is there; pages are bound."""
    told = HandoffSender(geometry(heads), TOKENS, 0, 1 << 60, 0, parts=giving.pools.parts)
    told.admitted(giving.pages)
    said = [action for event in published() for action in told.published(event)]
    done = PromptDone(request_id="request", first=(), cached_tokens=0, queue_ns=0, prefill_ns=0)
    for action in [*said, *told.prompt_done(done)]:
        match action:
            case sender.Announce():
                machine.published(over_the_wire(action.kv_slice, heads), 0)
            case sender.AnnounceCommit():
                record = (action.rectangles, action.payload_bytes, action.valid_tokens)
                machine.commit_record(*record, action.manifest)
    return told


def hand_off(giving: Replica, taking: Replica, heads: int) -> dict[Cell, bytes]:
    """One hand-off, to its commit; the digests that crossed it."""
    machine = open_receiver(taking, heads)
    told = tell_all(giving, machine, heads)
    actions = machine.bound(1, taking.pages)
    said: dict[Cell, bytes] = {}
    committed = False
    while actions:
        match actions.pop(0):
            case receiver_actions.Pull(kv_slices, epoch):
                assert not committed
                for kv_slice in kv_slices:
                    assert told.may_read(kv_slice)
                    assert machine.frame_arrived(kv_slice, epoch)
                    said.update(move(kv_slice, giving, taking))
                    actions += machine.frame_stored(kv_slice, epoch, 0)
            case receiver_actions.CommitKv():
                committed = True
            case receiver_actions.AskForPeer(reason):
                pytest.fail(reason)
    assert committed
    return said


def move(kv_slice: KvSlice, giving: Replica, taking: Replica) -> dict[Cell, bytes]:
    payload = memoryview(bytearray(kv_slice.payload_bytes(geometry(1))))
    source = giving.pools.holding(kv_slice)[0]
    digests = source.copy_out(giving.pages, kv_slice, BOUND, payload)
    for target in taking.pools.holding(kv_slice):
        assert target.place(taking.pages, kv_slice, BOUND, payload, digests)
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
        giving, taking = Replica(senders, heads, 1), Replica(receivers, heads, 2)
        giving.fill(whole)
        digests_of_all.append(hand_off(giving, taking, heads))
        for data, own in zip(taking.data, taking.heads, strict=True):
            got, want = data[:, :, taking.pages], whole[..., list(own), :].copy()
            want[:, :, -1, last:] = 0  # behind the prompt's last token nothing is sent
            assert (got == want).all()
            others = [page for page in range(8) if page not in taking.pages]
            assert not data[:, :, others].any()
    assert all(digests == digests_of_all[0] for digests in digests_of_all)
    assert len(digests_of_all[0]) == 2 * BLOCKS * heads, "every (layers, block, head)"


@pytest.mark.parametrize(("senders", "receivers"), [(1, 3), (3, 1), (3, 3), (2, 3)])
def test_nothing_is_committed_before_the_last_edge_is_there(senders: int, receivers: int) -> None:
    """Each edge in turn is the late one."""
    giving, taking = Replica(senders, 3, 1), Replica(receivers, 3, 2)
    edges = list(product(giving.pools.parts, taking.pools.parts))
    edges = [(one, other) for one, other in edges if set(one) & set(other)]
    assert len(edges) == max(senders, receivers)
    for late in edges:
        machine = open_receiver(taking, 3)
        tell_all(giving, machine, 3)
        held_back: list[KvSlice] = []
        actions = machine.bound(1, taking.pages)
        while actions:
            match actions.pop(0):
                case receiver_actions.Pull(kv_slices, epoch):
                    for kv_slice in kv_slices:
                        head = kv_slice.head_begin
                        if head in late[0] and head in late[1]:
                            held_back.append(kv_slice)
                        else:
                            assert machine.frame_arrived(kv_slice, epoch)
                            actions += machine.frame_stored(kv_slice, epoch, 0)
                case receiver_actions.CommitKv():
                    pytest.fail(f"committed without {late}")
        assert held_back
        for kv_slice in held_back:
            assert machine.state is ReceiverState.PULLING
            assert machine.frame_arrived(kv_slice, machine.epoch)
            actions = machine.frame_stored(kv_slice, machine.epoch, 0)
        assert receiver_actions.CommitKv(1) in actions


def test_a_commit_record_without_a_ranks_heads_is_not_believed() -> None:
    machine = open_receiver(Replica(1, 2, 2), 2)
    told = HandoffSender(geometry(2), TOKENS, 0, 1 << 60, 0, parts=(range(1),))
    for event in published():
        for action in told.published(event):
            machine.published(action.kv_slice, 0)
    done = PromptDone(request_id="request", first=(), cached_tokens=0, queue_ns=0, prefill_ns=0)
    record = told.prompt_done(done)[1]
    said = (record.rectangles, record.payload_bytes, record.valid_tokens, record.manifest)
    assert any(
        isinstance(action, receiver_actions.AskForPeer) for action in machine.commit_record(*said)
    )
