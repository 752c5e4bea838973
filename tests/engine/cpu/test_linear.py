"""Row counts: found, kept to, and proved."""

import numpy as np
import pytest
import torch

from baton.engine.cpu.linear import Linear, OneDnnWeight, RowCounts, probe_row_counts
from baton.engine.cpu.native.library import widens_bf16
from baton.engine.numerics import NumericsSetupError, cancelling, digest, same_bits


def test_a_product_is_the_plain_one() -> None:
    weight, x = torch.randn(48, 32), torch.randn(5, 32)
    assert torch.allclose(Linear(weight)(x), x @ weight.T, atol=1e-5)


def test_memory_is_planned_for_the_dtype_that_weights_are_kept_in() -> None:
    assert widens_bf16() is not torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_found_for_a_shape_keep_the_bits_of_a_row(dtype: torch.dtype) -> None:
    rows = probe_row_counts(96, 160, dtype)
    linear = Linear(torch.randn(96, 160).to(dtype), rows)
    x = torch.randn(700, 160).to(dtype)
    tiles = torch.cat([linear(x[i : i + 16]) for i in range(0, 688, 16)])
    for count in (1, 2, 9, 31, 50, 257, 688):
        assert same_bits(linear(x[:count]), tiles[:count]), count
    linear.check()


def test_rows_are_cut_into_permitted_counts_and_padded_at_the_end() -> None:
    rows = RowCounts(equal=frozenset({2, 4, 16}), free_from=None, limit=16)
    assert rows.pieces(16) == ((16, 16),)
    assert rows.pieces(1) == ((1, 2),)
    assert rows.pieces(37) == ((16, 16), (16, 16), (5, 16))
    weight, x = torch.randn(8, 12), torch.randn(37, 12)
    assert torch.allclose(Linear(weight, rows)(x), x @ weight.T, atol=1e-5)


def test_a_free_range_is_taken_whole() -> None:
    rows = RowCounts(equal=frozenset({1, 16}), free_from=4, limit=100)
    assert rows.pieces(57) == ((57, 57),)
    assert rows.pieces(203) == ((100, 100), (100, 100), (3, 16))


def test_every_cut_adds_up() -> None:
    rows = RowCounts(equal=frozenset({3, 16, 64, 256}), free_from=None, limit=256)
    for count in range(1, 1100):
        pieces = rows.pieces(count)
        assert sum(take for take, _ in pieces) == count
        assert all(padded in rows.equal and take <= padded for take, padded in pieces)


def test_a_wrong_set_of_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that sums one row in another order, and a row set that permits it."""
    real = OneDnnWeight.__call__

    def moody(weight: OneDnnWeight, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:  # the two halves of the sum one after the other
            half = x.shape[1] // 2
            left, right = x.clone(), x.clone()
            left[:, half:] = 0
            right[:, :half] = 0
            return real(weight, left) + real(weight, right)
        return real(weight, x)

    monkeypatch.setattr(OneDnnWeight, "__call__", moody)
    weight = torch.randn(64, 128)
    wrong = RowCounts(equal=frozenset({1, 16}), free_from=2, limit=64)
    with pytest.raises(NumericsSetupError, match="64 x 128 gives other bits for 1 rows"):
        Linear(weight, wrong).check()
    found = probe_row_counts(64, 128, torch.float32)
    assert 1 not in found.equal
    Linear(weight, found).check()


def test_cancelling_sums_show_the_order_of_summation() -> None:
    x = cancelling(4, 64, torch.bfloat16, sign=-1.0, seed=1).float()
    w = cancelling(4, 64, torch.bfloat16, sign=1.0, seed=2).float()
    assert (x.double() @ w.double().T).abs().max() < 1e-12
    products = (x * w).numpy()
    one_by_one = np.add.accumulate(products, axis=1)[:, -1]
    other = np.random.default_rng(0).permutation(64)
    assert (one_by_one != np.add.accumulate(products[:, other], axis=1)[:, -1]).any()


def test_digests_tell_bits_apart() -> None:
    zero = torch.zeros(4)
    assert digest([zero]) == digest([torch.zeros(4)])
    assert digest([zero]) != digest([-zero])
