"""Each kernel between the products against torch."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from baton.engine.cuda.kernels.rows import add_norm, add_to, gate_mul, rope_write
from baton.engine.numerics import same_bits

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@DTYPES
def test_the_norm_adds_to_the_sum_over_the_layers_first(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, delta, weight = torch.randn(3, 40), torch.randn(3, 40).to(dtype), torch.randn(40)
    total = x + delta.float()
    got = add_norm(x, delta, weight, 1e-5, dtype)
    assert same_bits(x, total)
    expected = F.rms_norm(total, (40,), weight, 1e-5).to(dtype)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-2)
    torch.testing.assert_close(add_norm(x, None, weight, 1e-5, dtype), got)
    assert same_bits(x, total)


def test_a_row_s_norm_does_not_depend_on_its_batch() -> None:
    x, weight = torch.randn(5, 40), torch.randn(40)
    together = add_norm(x, None, weight, 1e-5, torch.float32)
    assert same_bits(add_norm(x[3:4].clone(), None, weight, 1e-5, torch.float32), together[3:4])


def test_what_is_added_may_be_normed_itself() -> None:
    torch.manual_seed(0)
    x, delta, weight, post = torch.randn(3, 40), torch.randn(3, 40), torch.ones(40), torch.randn(40)
    total = x + F.rms_norm(delta, (40,), post, 1e-5)
    alone = x.clone()
    got = add_norm(x, delta, weight, 1e-5, torch.float32, post)
    add_to(alone, delta, 1e-5, post)
    torch.testing.assert_close(x, total)
    assert same_bits(alone, x)
    torch.testing.assert_close(got, F.rms_norm(total, (40,), weight, 1e-5))


@DTYPES
@pytest.mark.parametrize("gelu", [False, True])
def test_gates(dtype: torch.dtype, gelu: bool) -> None:
    gate_up = torch.randn(3, 2 * 1500).to(dtype)
    gate, up = gate_up[:, :1500].float(), gate_up[:, 1500:].float()
    expected = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
    got = gate_mul(gate_up, gelu=gelu)
    torch.testing.assert_close(got, expected.to(dtype), atol=1e-6, rtol=1e-2)


@DTYPES
@pytest.mark.parametrize("block", [16, 32])
def test_rope_turns_adjacent_pairs_and_writes_into_the_pages(
    dtype: torch.dtype, block: int
) -> None:
    torch.manual_seed(0)
    heads, kv_heads, dim = 3, 2, 24
    qkv = torch.randn(3, (heads + 2 * kv_heads) * dim).to(dtype)
    before = qkv.clone()
    positions, sequences = [50, 3, 7], [1, 0, -1]
    tables = torch.tensor([[5, 6, 7, 8], [4, 2, 9, 3]], dtype=torch.int32)
    pool = torch.zeros(2, 10, block, kv_heads, dim, dtype=dtype)
    angles = torch.arange(64).view(-1, 1) * (0.1 ** torch.arange(dim // 2))
    rotation = torch.stack((angles.cos(), angles.sin()), -1)
    rope_write(
        qkv,
        heads,
        torch.tensor(positions, dtype=torch.int32),
        torch.tensor(sequences, dtype=torch.int32),
        rotation,
        tables,
        pool,
    )
    for row in (0, 1):
        parts = before[row].view(-1, dim)
        pairs = torch.view_as_complex(parts.float().view(-1, dim // 2, 2))
        turned = torch.view_as_real(pairs * torch.view_as_complex(rotation)[positions[row]])
        turned = turned.reshape(-1, dim).to(dtype)
        block_id = tables[sequences[row], positions[row] // block]
        kv = pool[:, block_id, positions[row] % block]
        torch.testing.assert_close(qkv[row].view(-1, dim)[:heads], turned[:heads])
        torch.testing.assert_close(kv[0], turned[heads : heads + kv_heads])
        assert same_bits(kv[1], parts[heads + kv_heads :])
    assert int((pool != 0).any(-1).any(-1).sum()) == 4, "two rows, K and V, and nothing else"
    assert same_bits(qkv[2], before[2]), "a row that only pads is left alone"


def test_heads_are_biased_and_normed_before_they_turn() -> None:
    torch.manual_seed(0)
    heads, kv_heads, dim = 3, 2, 12
    qkv, bias = torch.randn(1, 7 * dim), torch.randn(7 * dim)
    norm, pool = torch.randn(heads + kv_heads, dim), torch.zeros(2, 1, 16, kv_heads, dim)
    angles = torch.randn(1, dim // 2)
    rotation = torch.stack((angles.cos(), angles.sin()), -1)
    parts = (qkv[0] + bias).view(-1, dim)
    expected = F.rms_norm(parts[:5], (dim,), None, 1e-6) * norm
    turned = torch.view_as_complex(expected.view(5, -1, 2)) * torch.view_as_complex(rotation[0])
    zero = torch.zeros(1, dtype=torch.int32)
    rope_write(
        qkv, heads, zero, zero, rotation, zero.view(1, 1), pool, bias=bias, norm=norm, eps=1e-6
    )
    turned = torch.view_as_real(turned).reshape(5, dim)
    torch.testing.assert_close(qkv[0].view(-1, dim)[:heads], turned[:heads])
    torch.testing.assert_close(pool[0, 0, 0], turned[heads:])
    torch.testing.assert_close(pool[1, 0, 0], parts[5:])
