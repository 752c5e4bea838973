"""Native products and rows: what torch computes, and every row by itself, bit for bit."""

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from baton.engine.cpu import quantised
from baton.engine.cpu.native import products
from baton.engine.cpu.native.library import load
from baton.engine.cpu.native.products import NativeInt4Weight, NativeWeight, int8_fits, native_fits
from baton.engine.cpu.native.rows import NativeRows, finite_rows, native_rows
from baton.engine.cpu.quantised import Int4Linear, Int8Linear
from baton.engine.cpu.rows import TorchRows
from baton.engine.numerics import cancelling, same_bits
from tests.engine.cpu.native_ways import OF_TILES, WAYS

EPS = 1e-5
HIDDEN, DIM, ROTATED, PLAIN = 96, 32, 4, 1

pytestmark = pytest.mark.skipif(
    load() is None, reason="no native kernels here: they need a compiler and AVX2"
)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=WAYS)
def sums(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "sums", lambda: WAYS[request.param])


@pytest.fixture
def rows() -> NativeRows:
    found = native_rows(torch.bfloat16, EPS, (DIM, HIDDEN))
    assert found is not None
    return found


def near(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the rounding to bf16."""
    error = (got.float() - expected.float()).abs()
    assert bool((error <= 0.01 + 0.01 * expected.float().abs()).all()), float(error.max())


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(64, 128), (1000, 90), (33, 2), (1, 576), (97, 1536)]
)
def test_a_product_is_right_and_its_rows_depend_on_themselves_alone(outputs, inputs, sums) -> None:
    weight = cancelling(outputs, inputs, torch.bfloat16, sign=1.0, seed=1)
    weight += torch.randn(outputs, inputs).bfloat16() * 0.1
    x = cancelling(200, inputs, torch.bfloat16, sign=-1.0, seed=2)
    layer = NativeWeight(weight)
    whole = layer(x)
    scale = x.float().abs() @ weight.float().abs().T
    assert bool(((whole.float() - x.float() @ weight.float().T).abs() <= 0.01 * scale + 1e-6).all())
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for count in (1, 2, 5, 6, 7, 12, 13, 25, 97, 200):
            assert same_bits(layer(x[200 - count :]), whole[200 - count :]), count


def test_a_product_has_the_bits_of_vdpbf16ps_on_every_cpu(monkeypatch) -> None:
    """One chain: of each pair the odd input first, one rounding for each product that is added.

    The operands are such that fp64 holds every sum exactly before it is rounded to fp32.
    """
    monkeypatch.setattr(products, "sums", lambda: WAYS["vdp"])
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(7, 62, generator=generator).bfloat16() for _ in range(2))
    sums = torch.zeros(7, 7)
    for pair in range(0, 62, 2):
        for k in (pair + 1, pair):
            terms = x[:, k].double()[:, None] * weight[:, k].double()[None]
            sums = (sums.double() + terms).float()
    assert same_bits(NativeWeight(weight)(x), sums.bfloat16())


@pytest.mark.parametrize("way", OF_TILES)
def test_a_product_has_the_bits_of_amx_on_every_cpu(way, monkeypatch) -> None:
    """For each 32 inputs a chain of the even and one of the odd, which are added to the sum.

    The inputs are no multiple of 32: what is missing is zeros.
    """
    monkeypatch.setattr(products, "sums", lambda: WAYS[way])
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(7, 102, generator=generator).bfloat16() for _ in range(2))
    total = torch.zeros(7, 7)
    for begin in range(0, 102, 32):
        chains = [torch.zeros(7, 7), torch.zeros(7, 7)]
        for k in range(begin, min(begin + 32, 102)):
            product = x[:, k].double()[:, None] * weight[:, k].double()[None]
            chains[k % 2] = (chains[k % 2].double() + product).float()
        total = total + (chains[0] + chains[1])
    assert same_bits(NativeWeight(weight)(x), total.bfloat16())


def test_tiles_in_software_and_fmas_have_the_same_bits() -> None:
    """The self-test before AMX is used, here of its kernels over tiles in software."""
    for way in OF_TILES:
        assert load().baton_tiles_agree(WAYS[way]) == 0, way


@pytest.mark.skipif(
    not int8_fits(torch.bfloat16), reason="no native kernels: oneDNN has these products"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("digits", [1, 2])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (33, 90), (1, 3), (97, 1536)])
def test_integer_products_are_exact_and_rows_depend_on_themselves_alone(
    outputs, inputs, digits, dtype, monkeypatch
) -> None:
    weight = torch.randn(outputs, inputs).to(dtype)
    x = (torch.randn(50, inputs) * torch.exp2(torch.randint(-9, 9, (50, 1)).float())).to(dtype)
    x[3] = 0
    native = Int8Linear(weight, digits)
    whole = native(x)
    size = weight.float().abs().amax(1).mul_(1 / 127).clamp_(min=1e-30)
    levels = (weight.float() / size[:, None]).round().double()
    monkeypatch.setattr(quantised, "int8_fits", lambda dtype: False)
    monkeypatch.setattr(
        Int8Linear, "_integer_product", lambda _, digit: (digit.double() @ levels.T * size).float()
    )
    other = Int8Linear(weight, digits)(x)
    step = 0.008 if dtype == torch.bfloat16 else 1e-5
    assert bool(((whole - other).abs() <= step * other.abs() + 1e-6 * x.abs().amax()).all())
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for count in (1, 2, 6, 7, 13, 49):
            assert same_bits(native(x[50 - count :]), whole[50 - count :]), count


def of_four_bits(
    x_MK: torch.Tensor, levels: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor
) -> torch.Tensor:
    """What the kernel computes, in fp64 and plainly."""
    weight = levels.double().unflatten(1, (-1, 32)) * scale.double()[..., None]
    weight = (weight + offset.double()[..., None]).flatten(1)
    unit = (x_MK.float().abs().amax(1, keepdim=True) * (1 / 127)).clamp_min(1e-30)
    values = x_MK.float() / unit
    low = ((values - values.round()) * 254).round()
    return (values.round().double() + low.double() / 254) * unit.double() @ weight.T


@pytest.mark.skipif(
    not int8_fits(torch.bfloat16), reason="no native kernels: torch has these products"
)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 128), (33, 32), (1, 96), (97, 1536)])
def test_products_of_four_bits_are_right_and_rows_depend_on_themselves_alone(
    outputs, inputs
) -> None:
    levels = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    scale = (torch.randn(outputs, inputs // 32) * 0.01).half()
    offset = (torch.randn(outputs, inputs // 32) * 0.1).half()
    layer = NativeInt4Weight(levels, scale, offset)
    x = (torch.randn(200, inputs) * torch.exp2(torch.randint(-9, 9, (200, 1)).float())).bfloat16()
    x[3] = 0
    whole = layer(x)
    expected = of_four_bits(x, levels, scale, offset)
    size = x.double().abs() @ torch.full((inputs, outputs), 0.3, dtype=torch.float64)
    assert bool(((whole - expected).abs() <= 0.004 * expected.abs() + 1e-5 * size).all())
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for count in (1, 2, 6, 7, 13, 97):
            assert same_bits(layer(x[200 - count :]), whole[200 - count :]), count
    some = slice(outputs // 3, outputs)
    part = NativeInt4Weight(*(each[some].contiguous() for each in (levels, scale, offset)))
    assert same_bits(part(x), whole[:, some])


@pytest.mark.skipif(
    not int8_fits(torch.bfloat16), reason="no native kernels: oneDNN has these products"
)
def test_integer_products_of_what_is_no_number_are_none() -> None:
    x = torch.ones(3, 64).bfloat16()
    x[0, 39], x[2, 0] = float("nan"), float("inf")
    for make in (Int8Linear, Int4Linear):
        y = make(torch.randn(5, 64).bfloat16())(x)
        assert torch.isnan(y[[0, 2]]).all()
        assert torch.isfinite(y[1]).all()


def test_what_is_stored_as_bf16_is_rounded_to_even_and_tiny_values_become_zero(sums) -> None:
    values = [1.00390625, 1.01171875, -1.00390625, 3.4e38, float("inf"), 1e-39, -1e-39, 2.0**-126]
    weight = torch.eye(8).bfloat16()
    x = torch.tensor([values]).bfloat16()
    wanted = x.clone()
    wanted[0, 5:7] = torch.tensor([0.0, 0.0])  # a sum with +0 is +0
    clean = torch.isfinite(x)
    assert same_bits(torch.where(clean, NativeWeight(weight)(torch.where(clean, x, 0)), x), wanted)


def test_columns_of_a_product_do_not_depend_on_the_others(sums) -> None:
    weight, x = torch.randn(150, 64).bfloat16(), torch.randn(9, 64).bfloat16()
    whole = NativeWeight(weight)(x)
    assert same_bits(NativeWeight(weight[40:113].contiguous())(x), whole[:, 40:113])


def test_rows_of_a_product_may_lie_apart_but_not_their_elements(sums) -> None:
    weight, x = torch.randn(40, 64).bfloat16(), torch.randn(5, 200).bfloat16()
    layer = NativeWeight(weight)
    assert same_bits(layer(x[:, 10:74]), layer(x[:, 10:74].contiguous()))
    turned = torch.randn(64, 5).bfloat16().T
    assert same_bits(layer(turned), layer(turned.contiguous()))
    assert layer(x[:0, :64]).shape == (0, 40)


def test_it_takes_bf16_of_an_even_width_only() -> None:
    assert native_fits(64, torch.bfloat16)
    assert not native_fits(63, torch.bfloat16)
    assert not native_fits(64, torch.float32)


def test_many_threads_at_once_get_their_own_results() -> None:
    """A second caller of the team computes alone, and a late helper takes no other job's work."""
    torch.set_num_threads(2)
    layers = [NativeWeight(torch.randn(256, 64).bfloat16()) for _ in range(3)]
    x = torch.randn(7, 64).bfloat16()
    expected = [layer(x) for layer in layers]
    wrong: list[int] = []

    def work(number: int) -> None:
        results = [layers[number](x) for _ in range(300)]
        wrong.extend(number for got in results if not same_bits(got, expected[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("post", [False, True])
def test_residual_sums_and_norms_are_torchs(rows: NativeRows, post: bool) -> None:
    plain = TorchRows(torch.bfloat16, EPS)
    x, part = torch.randn(70, HIDDEN), torch.randn(70, 2 * HIDDEN).bfloat16()[:, HIDDEN:]
    weight, behind = torch.rand(HIDDEN), torch.rand(HIDDEN) if post else None
    mine, theirs = x.clone(), x.clone()
    near(rows.add_norm(mine, part, behind, weight), plain.add_norm(theirs, part, behind, weight))
    assert torch.allclose(mine, theirs, atol=1e-5)
    near(rows.add_norm(mine, None, None, weight), plain.add_norm(mine, None, None, weight))
    assert len(rows.add_norm(mine, part, behind, None)) == 0
    assert torch.allclose(mine, x + 2 * (theirs - x), atol=1e-5)
    assert torch.allclose(rows.norm_fp32(x, weight), plain.norm_fp32(x, weight), atol=1e-5)
    of_experts = torch.randn(70, HIDDEN)  # fp32
    near(
        rows.add_norm(mine, of_experts, behind, weight),
        plain.add_norm(theirs + (theirs - x), of_experts, behind, weight),
    )


@pytest.mark.parametrize(("bias", "norm"), [(False, False), (True, False), (False, True)])
def test_heads_are_torchs(rows: NativeRows, bias: bool, norm: bool) -> None:
    width = (ROTATED + PLAIN) * DIM
    qkv = torch.randn(41, width).bfloat16()
    add = torch.randn(width) if bias else None
    scale = torch.rand(ROTATED, DIM) if norm else None
    angles = torch.rand(41, 1, DIM // 2) * 100
    rotation = torch.polar(torch.full_like(angles, 1.1), angles)
    mine, theirs = qkv.clone(), qkv.clone()
    rows.heads(mine, ROTATED, DIM, add, scale, rotation)
    TorchRows(torch.bfloat16, EPS).heads(theirs, ROTATED, DIM, add, scale, rotation)
    near(mine, theirs)
    if not bias:
        assert same_bits(mine[:, ROTATED * DIM :], qkv[:, ROTATED * DIM :])


@pytest.mark.parametrize("width", [112, 37, 5])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("kernels", ["native", "fp32 by torch", "bf16 by torch"])
def test_a_gate_does_not_depend_on_width_or_rows(
    rows: NativeRows, kernels: str, activation, width: int
) -> None:
    """An odd width, and any part of it: torch's own activations differ in the last elements."""
    dtype = torch.float32 if kernels.startswith("fp32") else torch.bfloat16
    ops = rows if kernels == "native" else TorchRows(dtype, EPS)
    torch.set_num_threads(2)
    x = (torch.randn(333, 2 * width) * 4).to(dtype)
    x[0, 0], x[1, 0] = 300.0, -300.0
    whole = ops.gate(x, activation)
    act = F.silu if activation == "silu" else lambda v: F.gelu(v, approximate="tanh")
    near(whole, act(x[:, :width].float()) * x[:, width:].float())
    assert same_bits(torch.cat([ops.gate(row[None], activation) for row in x]), whole)
    half = width // 2
    for part in (slice(0, half), slice(half, width)):
        apart = torch.cat((x[:, :width][:, part], x[:, width:][:, part]), dim=1)
        assert same_bits(ops.gate(apart, activation), whole[:, part])


@pytest.mark.parametrize("vocab", [33, 1000, 4099])
def test_the_best_logits_are_found_and_computed_again(rows: NativeRows, vocab: int) -> None:
    table, h = torch.randn(vocab, HIDDEN).bfloat16(), torch.randn(6, HIDDEN)
    raw = (h @ table.float().T).bfloat16()
    raw[1] = raw[1].sort().values  # every next one is better
    raw[2] = -3.0  # all equal
    ids, refined = rows.refine(raw, h, table, 32)
    expected = raw.topk(32, dim=-1).values
    assert torch.equal(raw.gather(1, ids), expected)
    assert ids[2].tolist() == list(range(32))
    assert all(len(set(row)) == 32 for row in ids.tolist())
    exact = torch.stack([(table[row].double() @ x.double()) for row, x in zip(ids, h, strict=True)])
    assert torch.allclose(refined.double(), exact, atol=1e-4)
    for row in range(6):
        alone = rows.refine(raw[row : row + 1], h[row : row + 1], table, 32)
        assert torch.equal(alone[0][0], ids[row])
        assert same_bits(alone[1][0], refined[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 31, 32, 49_153])
def test_what_is_not_finite_is_found_wherever_it_stands(dtype: torch.dtype, width: int) -> None:
    x = torch.full((5, width), torch.finfo(dtype).max, dtype=dtype)
    assert finite_rows(x) == [True] * 5
    x[1, -1], x[2, 0], x[4, width // 2] = float("nan"), float("-inf"), float("inf")
    assert finite_rows(x) == [True, False, False, True, False]
