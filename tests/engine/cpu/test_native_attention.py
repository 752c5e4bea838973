"""The native attention kernel: close to torch's, and every row by itself, bit for bit."""

import random
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

from baton.engine.cpu.attention import AttentionTiling, QuerySpan
from baton.engine.cpu.kv_codec import kv_codec
from baton.engine.cpu.native import attention as native
from baton.engine.cpu.native import library
from baton.engine.cpu.native.attention import NativeAttention, native_library
from baton.engine.numerics import same_bits
from baton.types.geometry import KvGeometry
from tests.engine.cpu.native_ways import WAYS

BLOCKS = 96
PAGES = 40  # of one sequence
SHAPES = [(9, 3, 64, None), (4, 1, 256, 100), (8, 2, 128, None), (6, 3, 32, 40), (4, 4, 96, 17)]
SINKS = {(8, 2, 128, None): (-2.0, 0.0, 3.0, 9.0), (6, 3, 32, 40): (5.0, -90.0, 100.0)}


@pytest.fixture(params=WAYS)
def sums(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "sums", lambda: WAYS[request.param])


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def sinks_of(heads: int, kv_heads: int, dim: int, window: int | None) -> list[torch.Tensor]:
    some = SINKS.get((heads, kv_heads, dim, window), ())
    return [torch.tensor(some * (heads // len(some)))] if some else []


def make(heads: int, kv_heads: int, dim: int, window: int | None):
    geometry = KvGeometry(
        num_layers=1, num_kv_heads=kv_heads, head_dim=dim, num_blocks=BLOCKS, dtype="bf16"
    )
    found = native_library(geometry, torch.bfloat16, heads, kv_heads)
    if found is None:
        pytest.skip("no native kernel here: it needs a compiler and AVX2")
    torch.manual_seed(0)
    pool = torch.randn(geometry.shape).bfloat16()
    tiling = AttentionTiling(unit=64, tile=64, align=1, decode_rows=heads // kv_heads)
    sinks = sinks_of(heads, kv_heads, dim, window)
    return NativeAttention(found, pool, geometry, heads, tiling, (window,), sinks=sinks), pool


def tables() -> list[list[int]]:
    order = list(range(BLOCKS))
    random.Random(1).shuffle(order)
    return [order[:PAGES], order[PAGES : 2 * PAGES]]


def reference(pool: torch.Tensor, q: torch.Tensor, table: list[int], window: int | None):
    """In fp32, over keys gathered from the pages."""
    kv_heads, dim = pool.shape[-2:]
    k, v = (pool[0, i][table].reshape(-1, kv_heads, dim).float() for i in (0, 1))
    positions, keys = torch.arange(len(q))[:, None], torch.arange(len(k))[None]
    seen = keys <= positions
    if window:
        seen &= keys > positions - window
    scores = torch.zeros(q.shape[1], *seen.shape).masked_fill(~seen, float("-inf"))
    for sink in sinks_of(q.shape[1], kv_heads, dim, window):  # a key whose value is zero
        k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
        scores = torch.cat((scores, sink.view(-1, 1, 1).expand(-1, len(q), 1)), dim=2)
    q, k, v = (x.transpose(0, 1)[None] for x in (q.float(), k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=scores, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window"), SHAPES)
def test_it_is_close_to_torch_and_rows_depend_on_themselves_alone(
    heads, kv_heads, dim, window, sums
):
    attention, pool = make(heads, kv_heads, dim, window)
    mine, other = tables()
    q = torch.randn(600, heads, dim).bfloat16()
    whole = attention.run(0, attention.plan([], [QuerySpan(0, 0, 600, mine)]), q)
    assert (whole.float() - reference(pool, q, mine, window)).abs().max() < 0.02
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for start, count in [(0, 1), (5, 1), (15, 2), (16, 1), (37, 100), (300, 299), (599, 1)]:
            rows = torch.cat([torch.randn(3, heads, dim).bfloat16(), q[start : start + count]])
            spans = [QuerySpan(0, 200, 3, other), QuerySpan(3, start, count, mine)]
            got = attention.run(0, attention.plan(spans[:0], spans), rows)
            assert same_bits(got[3:], whole[start : start + count])


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window"), [*SHAPES, (160, 5, 32, None)])
def test_many_sequences_share_units_of_several_heads(heads, kv_heads, dim, window, sums) -> None:
    attention, _ = make(heads, kv_heads, dim, window)
    mine, _ = tables()
    q = torch.randn(600, heads, dim).bfloat16()
    whole = attention.run(0, attention.plan([], [QuerySpan(0, 0, 600, mine)]), q)
    rows = list(range(5, 600, 15))
    spans = [QuerySpan(i, row, 1, mine) for i, row in enumerate(rows)]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert same_bits(attention.run(0, attention.plan(spans, []), q[rows]), whole[rows])
        for row in (5, 599):
            one = attention.plan([QuerySpan(0, row, 1, mine)], [])
            assert same_bits(attention.run(0, one, q[row : row + 1]), whole[row : row + 1])


@pytest.mark.parametrize(("start", "count"), [(0, 37), (99, 1)])
def test_nothing_beyond_a_sequence_is_read(sums, start, count) -> None:
    attention, pool = make(9, 3, 64, None)
    mine, other = tables()
    q = torch.randn(count, 9, 64).bfloat16()
    plan = attention.plan([], [QuerySpan(0, start, count, mine)])
    before = attention.run(0, plan, q).clone()
    last, within = divmod(start + count, 16)
    pool[:, :, other] = float("nan")
    pool[:, :, mine[last + 1 :]] = float("nan")
    pool[:, :, mine[last], within:] = float("nan")
    assert same_bits(attention.run(0, plan, q), before)


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_a_pool_of_bytes_is_written_and_read_as_the_codec_does(stored) -> None:
    """What comes back is what the codec gives back, so attention has the bits of a bf16 pool."""
    heads, kv_heads, dim, tokens = 6, 2, 64, 100
    shape = {"num_layers": 1, "num_kv_heads": kv_heads, "head_dim": dim, "num_blocks": BLOCKS}
    small, plain = (KvGeometry(**shape, dtype=dtype) for dtype in (stored, "bf16"))
    found = native_library(small, torch.bfloat16, heads, kv_heads)
    if found is None:
        pytest.skip("no native kernel here: it needs a compiler and AVX2")
    torch.manual_seed(3)
    kv = torch.randn(2, tokens, kv_heads, dim).bfloat16()
    kv *= torch.exp2(torch.randint(-12, 12, (2, tokens, kv_heads, 1)).float())
    kv[0, 7] = 0
    tiling = AttentionTiling(unit=64, tile=64, align=1, decode_rows=heads // kv_heads)
    pools = {
        small: torch.zeros(small.shape, dtype=torch.uint8),
        plain: torch.zeros(plain.shape, dtype=torch.bfloat16),
    }
    codec = kv_codec(small, torch.bfloat16)
    q = torch.randn(tokens, heads, dim).bfloat16()
    mine = tables()[0]
    outs = []
    for geometry, pool in pools.items():
        attention = NativeAttention(found, pool, geometry, heads, tiling)
        plan = attention.plan([], [QuerySpan(0, 0, tokens, mine)])
        attention.write(0, plan, kv if geometry is small else codec.decode(codec.encode(kv)))
        outs.append(attention.run(0, plan, q))
    written = pools[small][0][:, mine].flatten(1, 2)[:, :tokens]
    assert torch.equal(written, codec.encode(kv))
    assert same_bits(*outs)


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_what_is_no_number_stays_none_in_a_pool_of_bytes(stored) -> None:
    geometry = KvGeometry(num_layers=1, num_kv_heads=1, head_dim=32, num_blocks=2, dtype=stored)
    found = native_library(geometry, torch.bfloat16, 1, 1)
    if found is None:
        pytest.skip("no native kernel here: it needs a compiler and AVX2")
    tiling = AttentionTiling(unit=64, tile=64, align=1, decode_rows=1)
    for wrong in (float("nan"), float("inf")):
        pool = torch.zeros(geometry.shape, dtype=torch.uint8)
        attention = NativeAttention(found, pool, geometry, 1, tiling)
        kv = torch.ones(2, 3, 1, 32).bfloat16()
        kv[1, 1, 0, 5] = wrong
        plan = attention.plan([], [QuerySpan(0, 0, 3, [1])])
        attention.write(0, plan, kv)
        q = torch.ones(3, 1, 32).bfloat16()
        assert torch.isnan(attention.run(0, plan, q)[1:]).any()
        before = attention.plan([QuerySpan(0, 0, 1, [1])], [])
        assert torch.isfinite(attention.run(0, before, q[:1])).all()


def test_it_can_be_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_NATIVE", "0")
    assert library.load.__wrapped__() is None
    monkeypatch.delenv("BATON_NATIVE")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(library, "_path", library._path.__wrapped__)
    assert library.load.__wrapped__() is None
