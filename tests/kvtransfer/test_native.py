"""C++ moves KV to the same bytes and digests as Python, refuses the same damage, checks bounds."""

import os
import subprocess
import sys

import numpy as np
import pytest
from batonpb import prefill_pb2 as pb

from baton.types.geometry import KvGeometry
from kvtransfer import chunk
from kvtransfer.kv_slice import KvSlice, cut
from kvtransfer.lent_pages import LentFrame, page_digest
from kvtransfer.native import library
from tests.kvtransfer.frames import byte_frame, lent_frame

pytestmark = pytest.mark.skipif(library.load() is None, reason="no compiler, or another xxhash")

CLAIM = ("request", 1, 7, b"i" * 16)
BOUND = chunk.binding(*CLAIM)
THEIRS = (5, 6, 7, 2, 11, 10, 9)  # a run, pages on their own, and a run backwards
OURS = (1, 2, 3, 4, 14, 15, 0)
SHAPES = [
    KvGeometry(num_layers=3, num_kv_heads=heads, head_dim=dim, num_blocks=16, dtype=dtype)
    for heads, dim, dtype in ((3, 8, "bf16"), (2, 64, "bf16"), (2, 128, "bf16"), (4, 12, "int8"))
]
SLICES = [
    KvSlice(0, 3, 0, 2, 0, 7, 7 * 16),
    KvSlice(1, 2, 1, 1, 2, 5, 4 * 16 + 3),
    KvSlice(2, 1, 0, 1, 4, 1, 1),
]


def view(geometry: KvGeometry, native: bool, seed: int | None = None) -> chunk.PoolView:
    size = geometry.pool_bytes
    data = bytearray(size) if seed is None else bytearray(np.random.default_rng(seed).bytes(size))
    made = chunk.PoolView(data, geometry)
    assert made.native is not None
    if not native:
        made.native = None
    return made


def everything(geometry: KvGeometry) -> KvSlice:
    return KvSlice(0, geometry.num_layers, 0, geometry.num_kv_heads, 0, 7, 6 * 16 + 5)


@pytest.mark.parametrize("geometry", SHAPES)
def test_wire_bytes_and_digests_are_pythons(geometry: KvGeometry) -> None:
    fast, plain = view(geometry, True, 1), view(geometry, False, 1)
    for kv_slice in (*SLICES, everything(geometry), *cut(everything(geometry), geometry, 70_000)):
        frames = [memoryview(bytearray(kv_slice.payload_bytes(geometry))) for _ in range(2)]
        said = [
            pool.copy_out(THEIRS, kv_slice, BOUND, frame)
            for pool, frame in zip((fast, plain), frames, strict=True)
        ]
        assert said[0] == said[1]
        assert frames[0] == frames[1]
        pages = THEIRS[kv_slice.block_begin : kv_slice.block_begin + kv_slice.block_count]
        assert page_digest(fast, pages, kv_slice, BOUND) == page_digest(
            plain, pages, kv_slice, BOUND
        )


@pytest.mark.parametrize("geometry", SHAPES)
@pytest.mark.parametrize("lent", [False, True])
def test_what_is_placed_is_what_python_places(geometry: KvGeometry, lent: bool) -> None:
    for kv_slice in (*SLICES, everything(geometry)):
        pools = []
        for native in (True, False):
            source, target = view(geometry, native, 1), view(geometry, native)
            make = lent_frame if lent else byte_frame
            make(source, THEIRS, kv_slice, CLAIM, False).store(target, OURS, kv_slice, BOUND)
            assert target.read(OURS, kv_slice) == source.read(THEIRS, kv_slice)
            pools.append(target._data.tobytes())
        assert pools[0] == pools[1], "and nothing but that"


@pytest.mark.parametrize("lent", [False, True])
def test_one_bit_in_the_last_leaf_leaves_no_trace(lent: bool) -> None:
    geometry = SHAPES[1]
    kv_slice = everything(geometry)
    source, target = view(geometry, True, 1), view(geometry, True)
    frame = (lent_frame if lent else byte_frame)(source, THEIRS, kv_slice, CLAIM, False)
    if isinstance(frame, LentFrame):  # the lender's page has another byte since it was lent
        source._data[2, 1, THEIRS[6], 4, 1, 0] ^= 1
    else:
        damaged = bytearray(frame.frame)
        damaged[-1] ^= 1
        frame = chunk.ByteFrame(bytes(damaged))
    with pytest.raises(chunk.ChunkError, match="digest"):
        frame.store(target, OURS, kv_slice, BOUND)
    assert not target._data.any()


@pytest.mark.parametrize("digests", [b"", b"\0" * 8, b"\0" * 4096])
@pytest.mark.parametrize("lent", [False, True])
def test_digests_of_another_length_are_refused(lent: bool, digests: bytes) -> None:
    geometry, target = SHAPES[1], view(SHAPES[1], True)
    kv_slice = everything(geometry)
    source = view(geometry, True, 1)
    frame = (lent_frame if lent else byte_frame)(source, THEIRS, kv_slice, CLAIM, False)
    header: pb.ChunkHeader
    if isinstance(frame, LentFrame):
        header = frame.header
        header.digests = digests
    else:
        header, payload = chunk.decode(frame.frame)
        header.digests = digests
        frame = chunk.ByteFrame(chunk.encode(header, bytes(payload)))
    with pytest.raises(chunk.ChunkError):
        frame.store(target, OURS, kv_slice, BOUND)
    assert not target._data.any()


@pytest.mark.parametrize(
    ("pages", "change"),
    [
        ((5, 6), {}),
        ((*THEIRS[:6], 16), {}),
        ((*THEIRS[:6], -1), {}),
        (THEIRS, {"layer_begin": 1}),
        (THEIRS, {"head_begin": 1}),
    ],
)
def test_nothing_outside_the_pool_is_touched(pages: tuple[int, ...], change: dict) -> None:
    geometry, pool = SHAPES[1], view(SHAPES[1], True, 1)
    kv_slice = everything(geometry)._replace(**change)
    room = memoryview(bytearray(kv_slice.payload_bytes(geometry)))
    with pytest.raises(IndexError):
        pool.copy_out(pages, kv_slice, BOUND, room)
    with pytest.raises(IndexError):
        pool.place(pages, kv_slice, BOUND, room, bytes(8 * 7 * kv_slice.head_count))


def test_room_of_another_size_is_refused() -> None:
    geometry, pool = SHAPES[1], view(SHAPES[1], True, 1)
    with pytest.raises(ValueError, match="does not fit"):
        pool.copy_out(THEIRS, everything(geometry), BOUND, memoryview(bytearray(64)))


def test_without_native_code_python_does_it() -> None:
    code = "from kvtransfer.native import library; print(library.load())"
    said = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "BATON_NATIVE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == "None"
