"""Matrix products whose rows do not depend on how many there are."""

import pytest
import torch

from baton.engine.cuda.kernels import products
from baton.engine.cuda.kernels.configs import EXACT_ROWS, LinearConfig
from baton.engine.cuda.kernels.products import Products, fixed_linear, to_fp8
from baton.engine.numerics import same_bits

SMALL = LinearConfig(16, 16, 16, num_warps=4, num_stages=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_it_is_a_product_also_of_odd_sizes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(19, 37).to(dtype), torch.randn(21, 37).to(dtype)
    expected = x.float() @ w.float().t()
    torch.testing.assert_close(
        fixed_linear(x, w, SMALL, torch.float32), expected, atol=1e-4, rtol=1e-4
    )
    rounded = fixed_linear(x, w, SMALL, dtype)
    torch.testing.assert_close(rounded.float(), expected, atol=1e-4, rtol=1e-2)


def test_exact_rows_do_not_depend_on_their_number() -> None:
    torch.manual_seed(0)
    half = torch.randn(70, 80)
    x, w = torch.cat((half, half), 1), torch.cat((torch.ones(8, 80), -torch.ones(8, 80)), 1)
    product = Products(exact=True)
    together = product(x, w)
    assert together.abs().max() > 0, "the rounding noise is what is compared"
    for rows in (slice(0, 1), slice(33, 40), slice(5, 70)):
        assert same_bits(product(x[rows].contiguous(), w), together[rows])


@pytest.mark.parametrize("same", [True, False])
def test_the_cut_for_many_rows_is_used_only_where_it_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    torch.manual_seed(0)
    many = LinearConfig(32, 16, 32, num_warps=4, num_stages=2)
    monkeypatch.setattr(products, "_MANY", 64)
    monkeypatch.setattr(products, "EXACT_ROWS", SMALL)
    monkeypatch.setattr(products, "EXACT_MANY_ROWS", many)
    w, x = torch.randn(16, 40), torch.randn(64, 40)
    expected = fixed_linear(x, w, SMALL, torch.float32)
    used = []

    def spy(x: torch.Tensor, w: torch.Tensor, cut: LinearConfig, kind: torch.dtype) -> torch.Tensor:
        used.append(cut)
        out = fixed_linear(x, w, cut, kind)
        return out if same or cut == SMALL else out * (1 + 2**-20)  # a device that sums otherwise

    monkeypatch.setattr(products, "fixed_linear", spy)
    product = Products(exact=True)
    assert same_bits(product(x, w), expected)
    assert used[-1] == (many if same else SMALL)


def test_fast_is_torch_unless_a_cut_was_found_to_be_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, w = torch.randn(3, 32), torch.randn(16, 32)
    product = Products(exact=False)
    assert same_bits(product(x, w), torch.nn.functional.linear(x, w))
    half = product(x.bfloat16(), w.bfloat16(), torch.float32)
    assert half.dtype == torch.float32
    used = []
    monkeypatch.setattr(products, "tuned_linear", lambda *shape: used.append(shape) or EXACT_ROWS)
    torch.testing.assert_close(product(x, w), torch.nn.functional.linear(x, w))
    assert used == [(3, 16, 32)]


def test_fp8_weights_are_widened_exactly_and_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(35, 48).bfloat16(), torch.randn(32, 48).bfloat16()
    weight = to_fp8(w)
    kept = weight.values_NE.float() * weight.scale_N[:, None]
    assert ((kept - w.float()).abs() <= w.float().abs() / 16 + weight.scale_N[:, None] / 512).all()
    product = Products(exact=True)
    got = product(x, weight, torch.float32)
    torch.testing.assert_close(got, x.float() @ kept.t(), atol=1e-4, rtol=1e-4)
    assert same_bits(product(x[7:9].contiguous(), weight, torch.float32), got[7:9])
    assert same_bits(to_fp8(torch.zeros(2, 16)).values_NE.float(), torch.zeros(2, 16))


def test_fast_rounds_many_rows_to_fp8_too() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(17, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    weight, product = to_fp8(w), Products(exact=False)
    expected = x.float() @ w.float().t()
    few, many = product(x[:16].contiguous(), weight), product(x, weight)
    assert few.dtype == many.dtype == torch.bfloat16
    assert not same_bits(few, many[:16])
    for got, bound in ((few, 0.03), (many, 0.045)):  # one rounding of 2.6 % each, or both
        wanted = expected[: len(got)]
        assert (got.float() - wanted).norm() < bound * wanted.norm()
