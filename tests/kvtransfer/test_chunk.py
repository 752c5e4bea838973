"""Frames: only valid tokens travel, every byte and its place are covered, any split agrees."""

import numpy as np
import pytest
from batonpb import common_pb2 as common_pb
from batonpb import prefill_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

from baton.types.geometry import KvGeometry
from baton.wire.compatibility import disagreement, kv_group, own_wire
from kvtransfer import chunk
from kvtransfer.kv_slice import KvSlice, cut

GEOMETRY = KvGeometry(num_layers=5, num_kv_heads=3, head_dim=8, num_blocks=24, dtype="bf16")
BOUND = chunk.binding("request", 1, 7, b"i" * 16)


def pool(fill: bool) -> chunk.PoolView:
    size = GEOMETRY.pool_bytes
    data = bytearray(np.random.default_rng(1).bytes(size)) if fill else bytearray(size)
    return chunk.PoolView(data, GEOMETRY)


def whole(tokens: int, skip: int = 0) -> KvSlice:
    blocks = -(-tokens // 16)
    return KvSlice(0, 5, 0, 3, skip, blocks - skip, tokens - skip * 16)


def frame(view: chunk.PoolView, table, kv_slice: KvSlice, bound: bytes = BOUND):
    payload = view.read(table, kv_slice)
    request_id, attempt, generation, incarnation = bound.split(b"|")
    header = pb.ChunkHeader(
        request_id=request_id.decode(),
        attempt=int(attempt),
        generation=int(generation),
        source_incarnation=incarnation,
        kv_slice=kv_slice.to_wire(),
        payload_bytes=len(payload),
        digests=chunk.digests(payload, kv_slice, GEOMETRY, bound),
    )
    return header, payload


kv_slices = st.builds(
    lambda tokens, skip, layer, head: KvSlice(
        layer, 5 - layer, head, 3 - head, skip, -(-tokens // 16), tokens
    ),
    st.integers(1, 100),
    st.integers(0, 4),
    st.integers(0, 4),
    st.integers(0, 2),
)


@given(kv_slices, st.booleans())
def test_what_is_written_is_what_was_read(kv_slice, scattered):
    source, target = pool(fill=True), pool(fill=False)
    table = list(range(12))
    if scattered:
        table.reverse()
    for piece in cut(kv_slice, GEOMETRY, frame_bytes=66_000):
        header, payload = frame(source, table, piece)
        arrived = chunk.ByteFrame(chunk.encode(header, payload))
        arrived.store(target, list(range(12, 24)), piece, BOUND)
    assert target.read(list(range(12, 24)), kv_slice) == source.read(table, kv_slice)


@given(kv_slices)
def test_frames_stay_below_their_limit_and_tile_the_place(kv_slice):
    pieces = list(cut(kv_slice, GEOMETRY, frame_bytes=67_000))
    assert all(
        piece.payload_bytes(GEOMETRY) <= 67_000 - 65_536 or piece.block_count == 1
        for piece in pieces
    )
    assert sum(p.payload_bytes(GEOMETRY) for p in pieces) == kv_slice.payload_bytes(GEOMETRY)
    cells = [
        (layer, block)
        for p in pieces
        for layer in range(p.layer_begin, p.layer_begin + p.layer_count)
        for block in range(p.block_begin, p.block_begin + p.block_count)
    ]
    assert len(cells) == len(set(cells)) == kv_slice.layer_count * kv_slice.block_count


def test_bytes_behind_the_last_valid_token_are_never_sent():
    view = pool(fill=True)
    assert len(view.read([3], KvSlice(0, 5, 0, 3, 0, 1, 5))) == 5 * 5 * 2 * 3 * 8 * 2
    before = view.read([4], KvSlice(0, 5, 0, 3, 0, 1, 16))
    view.write([4], KvSlice(0, 5, 0, 3, 0, 1, 5), view.read([3], KvSlice(0, 5, 0, 3, 0, 1, 5)))
    after = np.frombuffer(view.read([4], KvSlice(0, 5, 0, 3, 0, 1, 16)), np.uint8)
    old = np.frombuffer(before, np.uint8)
    shape = (1, 3, 5, 2, 16, 16)
    assert (after.reshape(shape)[..., 5:, :] == old.reshape(shape)[..., 5:, :]).all()


@pytest.mark.parametrize("damage", ["flip", "swap", "torn", "place", "claim", "life", "request"])
def test_damage_is_refused(damage):
    view, table = pool(fill=True), list(range(12))
    kv_slice, other = whole(40), KvSlice(0, 5, 0, 3, 1, 3, 40)
    bound = {
        "claim": chunk.binding("request", 1, 6, b"i" * 16),
        "life": chunk.binding("request", 1, 7, b"j" * 16),
        "request": chunk.binding("other", 1, 7, b"i" * 16),
    }.get(damage, BOUND)
    header, payload = frame(view, table, kv_slice, bound)
    if damage == "flip":
        payload = payload[:100] + bytes([payload[100] ^ 64]) + payload[101:]
    if damage == "swap":
        payload = view.read(table, other)
    if damage == "torn":
        payload = payload[:-16]
    expected = other if damage == "place" else kv_slice
    arrived = chunk.ByteFrame(chunk.encode(header, payload))
    with pytest.raises(chunk.ChunkError):
        arrived.store(pool(fill=False), table, expected, BOUND)


@pytest.mark.parametrize("raw", [b"", b"abc", b"\xff\xff\xff\xff", b"\x04\0\0\0\xff\xff\xff\xff"])
def test_garbage_is_a_chunk_error(raw):
    with pytest.raises(chunk.ChunkError):
        chunk.decode(raw)


def test_digests_do_not_depend_on_the_split_over_ranks():
    """What a whole-model sender digests per (block, head), a one-head sender digests too."""
    view, table = pool(fill=True), list(range(12))
    payload = view.read(table, whole(48))
    together = chunk.digests(payload, whole(48), GEOMETRY, BOUND)
    leaf_bytes = len(payload) // 9
    for head in range(3):
        mine_only = KvSlice(0, 5, head, 1, 0, 3, 48)
        alone = view.read(table, mine_only)
        split = chunk.digests(alone, mine_only, GEOMETRY, BOUND)
        assert [split[i : i + 8] for i in (0, 8, 16)] == [
            together[8 * (block * 3 + head) :][:8] for block in range(3)
        ]
        for block in range(3):
            mine = alone[block * leaf_bytes : (block + 1) * leaf_bytes]
            begin = (block * 3 + head) * leaf_bytes
            assert payload[begin : begin + leaf_bytes] == mine


@pytest.mark.parametrize(("head_dim", "word_bytes"), [(8, 4), (12, 8)])
def test_a_quantised_vector_travels_with_its_scale(head_dim, word_bytes):
    geometry = KvGeometry(
        num_layers=2, num_kv_heads=3, head_dim=head_dim, num_blocks=4, dtype="int8"
    )
    data = np.random.default_rng(2).bytes(geometry.pool_bytes)
    source = chunk.PoolView(bytearray(data), geometry)
    received = bytearray(geometry.pool_bytes)
    target = chunk.PoolView(received, geometry)
    kv_slice = KvSlice(1, 1, 1, 2, 0, 2, 21)
    payload = source.read([3, 0], kv_slice)
    assert len(payload) == kv_slice.payload_bytes(geometry) == 21 * 2 * 2 * (head_dim + 4)
    assert source._data.itemsize == word_bytes
    target.write([3, 0], kv_slice, payload)
    sent = np.frombuffer(data, np.uint8).reshape(2, 2, 4, 16, 3, head_dim + 4)
    got = np.frombuffer(received, np.uint8).reshape(sent.shape)
    assert (got[1, :, 3, :, 1:] == sent[1, :, 3, :, 1:]).all()
    assert (got[1, :, 0, :5, 1:] == sent[1, :, 0, :5, 1:]).all()
    assert got.any(axis=-1).sum() == 21 * 2 * 2
    assert target.read([3, 0], kv_slice) == payload
    assert [piece.payload_bytes(geometry) for piece in cut(kv_slice, geometry)] == [len(payload)]


def test_pools_of_different_formats_name_both():
    def capabilities(dtype: str) -> common_pb.Capabilities:
        geometry = KvGeometry(num_layers=30, num_kv_heads=3, head_dim=64, num_blocks=4, dtype=dtype)
        wire = common_pb.WireRange(min=2, max=2)
        return common_pb.Capabilities(wire=wire, kv_groups=[kv_group(geometry)])

    assert disagreement(capabilities("int8"), capabilities("int8")) == ""
    said = disagreement(capabilities("int8"), capabilities("bf16"))
    assert "int8/30x3x64/16 (k+v+k_scale+v_scale) here" in said
    assert "bf16/30x3x64/16 (k+v) there" in said
    assert "fp8" in disagreement(capabilities("int8"), capabilities("fp8"))


def test_golden_wire_bytes():
    """The wire order and the digests are frozen."""
    geometry = KvGeometry(num_layers=2, num_kv_heads=2, head_dim=4, num_blocks=2, dtype="bf16")
    data = np.arange(geometry.pool_bytes // 2, dtype="<u2").tobytes()
    view = chunk.PoolView(bytearray(data), geometry)
    kv_slice = KvSlice(0, 2, 0, 2, 0, 2, 18)
    payload = view.read([1, 0], kv_slice)
    values = np.frombuffer(payload, "<u2")
    layer, kv, block, token, head, dim = 1, 1, 1, 3, 1, 2
    # block 1 of the pool is the prompt's block 0: [head, layer, kv, token, dim]
    index = (((head * 2 + layer) * 2 + kv) * 16 + token) * 4 + dim
    pool_index = ((((layer * 2 + kv) * 2 + block) * 16 + token) * 2 + head) * 4 + dim
    assert values[index] == pool_index
    digests = chunk.digests(payload, kv_slice, geometry, chunk.binding("r", 1, 1, b"\0" * 16))
    assert digests.hex() == GOLDEN


GOLDEN = "219ca7a0cb377aada4865addeef0d8f89269e2f538326f7b1730c0e15fccbcfd"


@pytest.mark.parametrize(
    ("ours", "theirs", "helps"),
    [("tile", "vdp", True), ("tile", "tile", False), ("tile", "u64t64", False)],
)
def test_workers_that_sum_differently_are_told_what_to_set(ours, theirs, helps) -> None:
    sides = [
        common_pb.Capabilities(wire=own_wire(), numerics_id=f"exact/bf16/adjacent/{sums}/{digest}")
        for sums, digest in ((ours, "ab"), (theirs, "cd"))
    ]
    said = disagreement(*sides)
    assert said.startswith("numerics differ")
    assert ("numerics: {native: tile}" in said) == helps
