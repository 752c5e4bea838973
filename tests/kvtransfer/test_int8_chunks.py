"""KV as int8 on the wire: what is lost, what is refused, and that nobody gets it unasked."""

import numpy as np
import numpy.typing as npt
import pytest
from batonpb.common_pb2 import INT8
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.chunk import ChunkError, payload_bytes
from kvtransfer.int8_chunks import decode_int8, encode_int8
from kvtransfer.transports import CARRY_INT8
from tests.kvtransfer.damaged_frames import KINDS
from tests.kvtransfer.edge_ends import BLOCKS, GEOMETRY, OURS, SendingEnd, reading_end, slices

DIM = 16


def bf16(values: npt.ArrayLike) -> bytes:
    """Cut to bf16, not rounded."""
    bits = np.asarray(values, np.float32).view(np.uint32) >> 16
    return bits.astype(np.uint16).tobytes()


def floats(plain: bytes | memoryview) -> npt.NDArray[np.float32]:
    wide = np.frombuffer(plain, np.uint16).astype(np.uint32) << 16
    return wide.view(np.float32).reshape(-1, DIM)


def coded(plain: bytes) -> bytearray:
    payload = bytearray(len(plain) // (2 * DIM) * (DIM + 4))
    encode_int8(plain, DIM, memoryview(payload))
    return payload


@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.floats(1e-15, 1e30))
def test_a_value_comes_back_within_one_scale_of_its_vector(seed: int, size: float) -> None:
    noise = np.random.default_rng(seed)
    values = noise.standard_normal((5000, DIM)) * size * noise.lognormal(0, 2, (5000, 1))
    plain = bf16(values)
    before, after = floats(plain), floats(decode_int8(coded(plain), DIM))
    scale = np.abs(before).max(axis=1, keepdims=True) / 127
    assert (np.abs(after - before) <= scale * 1.0001).all()
    assert np.abs(after - before).mean() < 0.3 * scale.mean()
    largest = np.abs(before).argmax(axis=1)[:, None]
    assert (np.take_along_axis(after, largest, 1) == np.take_along_axis(before, largest, 1)).all()


@given(st.integers(0, 1 << 30))
def test_kv_that_is_handed_on_loses_nothing_more(seed: int) -> None:
    once = decode_int8(coded(bf16(np.random.default_rng(seed).standard_normal((4000, DIM)))), DIM)
    assert decode_int8(coded(bytes(once)), DIM) == once


def test_zeros_stay_zeros_and_what_is_not_finite_makes_its_vector_nan() -> None:
    values = np.ones((5, DIM), np.float32)
    values[1] = 0
    values[2, 3], values[3, 5], values[4, 7] = np.nan, np.inf, -np.inf
    after = floats(decode_int8(coded(bf16(values)), DIM))
    assert (after[0] == 1).all()
    assert (after[1] == 0).all()
    assert np.isnan(after[2:]).all()


@pytest.mark.parametrize("way", CARRY_INT8)
@pytest.mark.parametrize("damage", ["", *KINDS])
async def test_a_pull_in_int8_is_verified_like_any_other(damage: str, way: str) -> None:
    end = SendingEnd(f"{damage}:2" if damage else "", encodings=(INT8,))
    async with end.served() as peer, reading_end(way) as ours:
        ours.encoding = INT8
        missing, tries = slices(), 0
        while missing:
            faults = await ours.fetch(peer, missing)
            assert all(isinstance(fault, ChunkError) for fault in faults if fault is not None)
            assert any(faults) == bool(damage) or tries
            missing = [s for s, fault in zip(missing, faults, strict=True) if fault is not None]
            assert not any(any(ours.view.read(OURS, s)) for s in missing), "no trace of it is left"
            missing.reverse()
            tries += 1
            assert tries < 10
        for kv_slice in slices():
            sent = end.view.read(BLOCKS, kv_slice)
            assert ours.view.read(OURS, kv_slice) == bytes(decode_int8(coded(sent), DIM))
            assert payload_bytes(kv_slice, GEOMETRY, INT8) / len(sent) == (DIM + 4) / (2 * DIM)


async def test_a_frame_in_another_encoding_than_was_asked_for_is_refused() -> None:
    """As a sender in ``exact`` answers, whatever is asked of it."""
    async with SendingEnd().served() as peer, reading_end("grpc") as ours:
        ours.encoding = INT8
        faults = await ours.fetch(peer, slices())
        assert {fault.cause for fault in faults if isinstance(fault, ChunkError)} == {"encoding"}
        assert None not in faults
        assert not any(any(ours.view.read(OURS, kv_slice)) for kv_slice in slices())
