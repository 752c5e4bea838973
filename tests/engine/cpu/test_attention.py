"""Attention against its definition, and tilings against their promise."""

import pytest
import torch

from baton.engine.cpu import selftest
from baton.engine.cpu.attention import AttentionTiling, PagedAttention, QuerySpan
from baton.engine.cpu.selftest import (
    attention_fault,
    candidate_tilings,
    choose_tiling,
    fast_tiling,
    probe_data,
)
from baton.engine.numerics import DTYPES, NumericsSetupError, same_bits
from baton.types.geometry import KvGeometry

HEADS, KV_HEADS, DIM = 6, 2, 32


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int = 1_000_000
) -> torch.Tensor:
    """``q [T, H, D]`` at ``start ...`` over ``k, v [S, K, D]``, by the textbook."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", q, k) / q.shape[2] ** 0.5
    queries, keys = torch.arange(start, start + q.shape[0]).view(-1, 1), torch.arange(k.shape[0])
    unseen = (keys > queries) | (keys <= queries - window)
    weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).reshape(q.shape[0], -1)


@pytest.fixture
def pool() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 2, 40, 16, KV_HEADS, DIM)


def attention_over(
    pool: torch.Tensor, tiling: AttentionTiling, windows: tuple[int | None, ...] = ()
) -> PagedAttention:
    geometry = KvGeometry(
        num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, num_blocks=40, dtype="fp32"
    )
    return PagedAttention(pool, geometry, HEADS, tiling, windows)


@pytest.mark.parametrize("tiling", [*candidate_tilings(3), fast_tiling(3)], ids=str)
@pytest.mark.parametrize(
    "table", [[5, 6, 7, 8, 9, 10], [30, 2, 17, 4, 9, 11], [34, 35, 36, 37, 38, 39]], ids=str
)
def test_it_computes_attention(
    pool: torch.Tensor, tiling: AttentionTiling, table: list[int]
) -> None:
    attention = attention_over(pool, tiling)
    keys, values = pool[1][:, table].reshape(2, 96, KV_HEADS, DIM)
    for start, count in ((0, 96), (0, 5), (31, 34), (70, 20)):
        q = torch.randn(count, HEADS, DIM)
        got = attention.run(1, attention.plan([], [QuerySpan(0, start, count, table)]), q)
        end = start + count
        assert torch.allclose(got, reference(q, keys[:end], values[:end], start), atol=1e-5)
    for position in (0, 15, 16, 63, 64, 95):
        q = torch.randn(1, HEADS, DIM)
        got = attention.run(1, attention.plan([QuerySpan(0, position, 1, table)], []), q)
        expected = reference(q, keys[: position + 1], values[: position + 1], position)
        assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("tiling", [*candidate_tilings(3), fast_tiling(3)], ids=str)
@pytest.mark.parametrize("window", [1, 16, 40, 70, 200])
@pytest.mark.parametrize(
    "table", [list(range(20, 36)), [(11 * i) % 40 for i in range(16)]], ids=["run", "scattered"]
)
def test_a_window_hides_what_is_older(
    pool: torch.Tensor, tiling: AttentionTiling, window: int, table: list[int]
) -> None:
    attention = attention_over(pool, tiling, (None, window))
    keys, values = pool[1][:, table].reshape(2, 256, KV_HEADS, DIM)
    for start, count in ((0, 256), (101, 60), (250, 5)):
        q, end = torch.randn(count, HEADS, DIM), start + count
        got = attention.run(1, attention.plan([], [QuerySpan(0, start, count, table)]), q)
        expected = reference(q, keys[:end], values[:end], start, window)
        assert torch.allclose(got, expected, atol=1e-5)
    positions = [100, 101, 255]
    q = torch.randn(3, HEADS, DIM)
    spans = [QuerySpan(row, position, 1, table) for row, position in enumerate(positions)]
    got = attention.run(1, attention.plan(spans, []), q)
    for row, position in enumerate(positions):
        expected = reference(q[row : row + 1], keys, values, position, window)
        assert torch.allclose(got[row], expected[0], atol=1e-5)


def test_layers_without_a_window_see_everything_in_the_same_step(pool: torch.Tensor) -> None:
    attention = attention_over(pool, candidate_tilings(3)[1], (8, None))
    table = [5, 6, 7, 8, 9, 10]
    q = torch.randn(1, HEADS, DIM)
    plan = attention.plan([QuerySpan(0, 95, 1, table)], [])
    for layer, window in ((0, 8), (1, 1_000)):
        keys, values = pool[layer][:, table].reshape(2, 96, KV_HEADS, DIM)
        expected = reference(q, keys, values, 95, window)
        assert torch.allclose(attention.run(layer, plan, q), expected, atol=1e-5)


def test_a_mixed_step_equals_its_parts(pool: torch.Tensor) -> None:
    attention = attention_over(pool, candidate_tilings(3)[1])
    tables = [[0, 1, 2], [9, 7, 5], [10, 11, 12], [20, 21, 22, 23, 24]]
    decodes = [QuerySpan(i, 33 + i, 1, tables[i]) for i in range(3)]
    chunk = QuerySpan(3, 9, 40, tables[3])
    q = torch.randn(43, HEADS, DIM)
    together = attention.run(0, attention.plan(decodes, [chunk]), q)
    for span in (*decodes, chunk):
        rows = slice(span.row, span.row + span.count)
        keys, values = pool[0][:, list(span.blocks)].reshape(2, -1, KV_HEADS, DIM)
        end = span.start + span.count
        expected = reference(q[rows], keys[:end], values[:end], span.start)
        assert torch.allclose(together[rows], expected, atol=1e-5)


def test_isolated_rows_read_no_block_but_their_own(pool: torch.Tensor) -> None:
    attention = attention_over(pool, candidate_tilings(3)[1])
    pool[:, :, 3:] = float("nan")
    q = torch.randn(1, HEADS, DIM)
    span = QuerySpan(0, 40, 1, [0, 1, 2])
    assert attention.run(0, attention.plan([span], []), q).isnan().any()
    assert not attention.run(0, attention.plan([span], [], isolated=True), q).isnan().any()


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 64)])
def test_a_tiling_that_keeps_the_promise_is_found(
    dtype: str, heads: int, kv_heads: int, dim: int
) -> None:
    tiling = choose_tiling(heads, kv_heads, dim, dtype)
    assert attention_fault(tiling, heads, kv_heads, dim, dtype) is None


def test_lengths_that_do_not_follow_the_position_are_found_out() -> None:
    unaligned = AttentionTiling(unit=16, tile=128, align=1, decode_rows=4)
    assert attention_fault(unaligned, 9, 3, 64, "fp32") is not None


@pytest.mark.parametrize(
    "dtype", [pytest.param(d, marks=[pytest.mark.slow] * (d == "fp32")) for d in DTYPES]
)
@pytest.mark.parametrize("window", [100, pytest.param(512, marks=pytest.mark.slow)])
def test_a_tiling_keeps_the_promise_with_a_window(dtype: str, window: int) -> None:
    tiling = choose_tiling(4, 1, 256, dtype, window)
    assert attention_fault(tiling, 4, 1, 256, dtype, window) is None


@pytest.mark.usefixtures("key_counting_kernel")
def test_a_window_that_does_not_begin_at_a_unit_is_found_out() -> None:
    class Unaligned(AttentionTiling):
        def first_key(self, position: int, window: int | None) -> int:
            return 0 if window is None else max(0, position - window + 1) // 16 * 16

    tiling = choose_tiling(9, 3, 64, "fp32")
    slack = Unaligned(tiling.unit, tiling.tile, tiling.align, tiling.decode_rows)
    assert attention_fault(tiling, 9, 3, 64, "fp32", 200) is None
    assert attention_fault(slack, 9, 3, 64, "fp32") is None
    assert "a window of 200" in str(attention_fault(slack, 9, 3, 64, "fp32", 200))


def test_without_any_tiling_the_setup_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "candidate_tilings", lambda group: [fast_tiling(group)])
    with pytest.raises(NumericsSetupError, match=r"9 heads over 3 of 64 in fp32.*numerics: fast"):
        choose_tiling(9, 3, 64, "fp32")


def test_the_number_of_keys_is_a_function_of_the_position() -> None:
    tiling = AttentionTiling(unit=64, tile=64, align=4, decode_rows=4)
    assert [tiling.keys(p) for p in (0, 63, 64, 127, 128)] == [64, 64, 128, 128, 192]
    assert [tiling.first_key(p, 100) for p in (0, 127, 128, 191, 192, 255)] == [0, 0, 0, 0, 64, 64]
    assert tiling.first_key(5_000, None) == 0


def test_every_chunk_of_a_unit_has_the_bits_of_the_whole() -> None:
    """fp32 on a Cascade Lake: of 44 rows from the start the last differed, and no probe saw it."""
    tiling = choose_tiling(9, 3, 64, "fp32")
    q, keys, values = probe_data(9, 3, 64, "fp32", noise=True)
    blocks = list(range(len(q) // 16))
    geometry = KvGeometry(
        num_layers=1, num_kv_heads=3, head_dim=64, num_blocks=len(blocks), dtype="fp32"
    )
    pool = torch.zeros(geometry.shape)
    pool[0, 0, blocks] = keys.view(len(blocks), 16, 3, 64)
    pool[0, 1, blocks] = values.view(len(blocks), 16, 3, 64)
    attention = PagedAttention(pool, geometry, 9, tiling, (None,))

    def run(start: int, end: int) -> torch.Tensor:
        calls = attention.plan([], [QuerySpan(0, start, end - start, blocks)])
        return attention.run(0, calls, q[start:end])

    whole = run(0, len(q))
    differing = [
        (start, end)
        for start in range(64)
        for end in range(start + 1, 66)
        if not same_bits(run(start, end), whole[start:end])
    ]
    assert differing == []
