"""Memory of packed weights: places that are aligned, apart, and live as long as they are held."""

import ctypes
import gc

import pytest

from baton.engine.cpu.native import memory


def test_places_are_aligned_and_apart_and_zero() -> None:
    sizes = [1, 63, 64, 65, 5 << 20, 11 << 20, 17 << 20, 100]
    taken = [memory.memory_for(size) for size in sizes]
    for number, ((_, place), size) in enumerate(zip(taken, sizes, strict=True)):
        assert place % 64 == 0
        assert not any(ctypes.string_at(place, size))
        ctypes.memset(place, number + 1, size)
    for number, ((_, place), size) in enumerate(zip(taken, sizes, strict=True)):
        assert ctypes.string_at(place, size) == bytes([number + 1]) * size


def test_a_piece_lives_until_its_last_place_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = []
    really = memory._map

    class Piece(memory.mmap.mmap):  # type: ignore[name-defined, misc]
        def __del__(self) -> None:
            mapped.append("gone")

    monkeypatch.setattr(memory.mmap, "mmap", Piece)
    assert isinstance(really(4096), Piece)
    monkeypatch.setattr(memory, "_left", [])
    first, second = memory.memory_for(10 << 20), memory.memory_for(10 << 20)
    mapped.clear()
    memory._left.clear()
    del first
    gc.collect()
    assert mapped == ["gone"]
    ctypes.memset(second[1], 1, 10 << 20)


def test_a_kernel_without_huge_pages_gives_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.mmap, "MADV_HUGEPAGE", 12345)
    piece, place = memory.memory_for(20 << 20)
    assert len(piece) == 20 << 20  # type: ignore[arg-type]
    ctypes.memset(place, 1, 20 << 20)
