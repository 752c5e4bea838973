"""Paged attention against SDPA, and its promise: a query's bits depend on its position alone."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from baton.engine.cuda.kernels import attention
from baton.engine.cuda.kernels.attention import (
    Span,
    Tiles,
    Workspace,
    list_items,
    make_tiles,
    paged_attention,
    tiles_of,
)
from baton.engine.cuda.kernels.configs import AttentionConfig

Tables = Callable[..., list[list[int]]]
Reference = Callable[..., torch.Tensor]

CUT = AttentionConfig(block_m=16, kv_tile=16, split=32, num_warps=4, num_stages=2)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


class Step:
    """Queries of several sequences over a pool in which every page of nobody is NaN."""

    def __init__(
        self,
        spans: Sequence[tuple[int, int]],
        make_tables: Tables,
        *,
        heads: int = 6,
        kv_heads: int = 2,
        dim: int = 16,
        block: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(1)
        self.spans = []
        rows = 0
        for number, (start, count) in enumerate(spans):
            self.spans.append(Span(rows, start, count, number))
            rows += count
        lengths = [start + count for start, count in spans]
        self.tables = make_tables(lengths, block)
        blocks = max(max(table) for table in self.tables) + 2
        self.pool = torch.full((2, blocks, block, kv_heads, dim), float("nan"), dtype=dtype)
        for table, length in zip(self.tables, lengths, strict=True):
            kv = torch.randn(2, length, kv_heads, dim).to(dtype)
            for position in range(length):  # the tail of the last page stays NaN
                self.pool[:, table[position // block], position % block] = kv[:, position]
        self.q = torch.randn(rows, heads, dim).to(dtype)
        width = max(map(len, self.tables))
        padded = [table + [0] * (width - len(table)) for table in self.tables]
        self.table_tensor = torch.tensor(padded, dtype=torch.int32)

    def run(
        self,
        *,
        spread: bool = False,
        padding: int = 0,
        cut: AttentionConfig = CUT,
        window: int = 0,
        only: Sequence[int] | None = None,
        queries: int = 0,
    ) -> torch.Tensor:
        """``only`` some of the spans; rows of the others are 0.

        ``spread``: a program for each split, and as many with nothing to do as ``padding`` says.
        """
        group = self.q.shape[1] // self.pool.shape[3]
        spans = [span for i, span in enumerate(self.spans) if only is None or i in only]
        most = queries or cut.queries(group)
        tiles = make_tiles(spans, most, self.q.device, split=cut.split if spread else 0)
        if padding:
            assert tiles.items_2I is not None
            idle = torch.full((2, padding), -1, dtype=torch.int32)
            tiles = Tiles(tiles.table_5N, torch.cat((tiles.items_2I, idle), 1), most)
        out = torch.zeros_like(self.q)
        paged_attention(
            self.q,
            self.pool,
            self.table_tensor,
            tiles,
            out,
            cut,
            Workspace(torch.device("cpu")),
            window=window,
        )
        return out

    def expected(self, reference: Reference, window: int = 0) -> torch.Tensor:
        parts = []
        for span, table in zip(self.spans, self.tables, strict=True):
            end = span.start + span.count
            k, v = self.pool[:, table].flatten(1, 2)[:, :end]
            q = self.q[span.row : span.row + span.count]
            parts.append(reference(q, k, v, span.start, window))
        return torch.cat(parts)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.float(), expected, atol=TOLERANCE[got.dtype], rtol=1e-2)


DECODE = [(40, 1), (0, 1), (15, 1), (63, 1)]
VERIFY = [(37, 4), (0, 2), (61, 3)]
PREFILL = [(0, 21), (29, 18)]


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, id="fp32", marks=pytest.mark.slow), torch.bfloat16]
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1), (8, 1)])
@pytest.mark.parametrize("block", [16, 32])
def test_decode_over_splits_is_attention(
    scattered: Tables, sdpa: Reference, heads: int, kv_heads: int, block: int, dtype: torch.dtype
) -> None:
    step = Step(DECODE[:2], scattered, heads=heads, kv_heads=kv_heads, block=block, dtype=dtype)
    close(step.run(spread=True, queries=1), step.expected(sdpa))


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (3, 1), (4, 1), (8, 1)])
def test_prefill_of_several_sequences_is_attention(
    scattered: Tables, sdpa: Reference, heads: int, kv_heads: int
) -> None:
    step = Step(PREFILL, scattered, heads=heads, kv_heads=kv_heads)
    cut = AttentionConfig(32, 16, 0, num_warps=4, num_stages=2)
    close(step.run(cut=cut), step.expected(sdpa))


def test_verification_of_several_tokens_is_attention(scattered: Tables, sdpa: Reference) -> None:
    step = Step(VERIFY, scattered, dtype=torch.bfloat16)
    close(step.run(spread=True, queries=4), step.expected(sdpa))


@pytest.mark.parametrize("spread", [False, True])
def test_a_window_hides_what_is_too_old(scattered: Tables, sdpa: Reference, spread: bool) -> None:
    step = Step([(66, 4), (3, 2)], scattered, heads=3, kv_heads=1)
    close(step.run(spread=spread, window=20, queries=4), step.expected(sdpa, 20))


def test_a_head_dim_that_is_no_power_of_two(scattered: Tables, sdpa: Reference) -> None:
    step = Step([(17, 3)], scattered, heads=2, kv_heads=1, dim=24)
    close(step.run(spread=True, queries=3), step.expected(sdpa))
    close(step.run(), step.expected(sdpa))


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, id="fp32", marks=pytest.mark.slow), torch.bfloat16],
)
def test_splits_give_the_bits_of_one_program(scattered: Tables, dtype: torch.dtype) -> None:
    step = Step(VERIFY, scattered, heads=3, kv_heads=1, dtype=dtype)
    assert torch.equal(step.run(spread=True), step.run())
    assert torch.equal(step.run(spread=True, padding=3), step.run()), "idle programs change nothing"


def test_a_sequence_alone_has_the_bits_it_has_in_a_batch(scattered: Tables) -> None:
    step = Step(DECODE, scattered)
    together = step.run(spread=True, queries=1)
    for number, span in enumerate(step.spans):
        alone = step.run(spread=True, queries=1, only=[number])
        assert torch.equal(alone[span.row], together[span.row])


def test_bits_do_not_depend_on_the_chunk(scattered: Tables) -> None:
    step = Step([(0, 45)], scattered, heads=3, kv_heads=1)
    whole = step.run()
    for start, end in ((0, 7), (7, 33), (33, 44), (44, 45)):
        step.spans = [Span(start, start, end - start, 0)]
        assert torch.equal(step.run(spread=end - start <= 5)[start:end], whole[start:end])


def test_rows_of_no_tile_are_left_alone(scattered: Tables) -> None:
    step = Step(DECODE[:2], scattered)
    out = step.run(spread=True, only=[0])
    assert out[0].any()
    assert not out[1].any()


def test_tiles_begin_at_multiples_and_the_longest_come_first() -> None:
    tiles = tiles_of([Span(0, 6, 9, 0), Span(9, 100, 1, 1)], queries=4)
    assert tiles == [(9, 1, 100, 1), (6, 3, 12, 0), (2, 4, 8, 0), (0, 2, 6, 0)]


def test_more_queries_than_a_tile_has_rows_are_refused(scattered: Tables) -> None:
    step = Step(PREFILL, scattered)
    with pytest.raises(ValueError, match="6 queries of 3 heads exceed 16"):
        step.run(queries=6)
    unsplit = AttentionConfig(16, 16, 0, num_warps=4, num_stages=2)
    tiles = make_tiles(step.spans, 1, step.q.device, split=32)
    with pytest.raises(ValueError, match="items need a configuration"):
        paged_attention(
            step.q,
            step.pool,
            step.table_tensor,
            tiles,
            step.q,
            unsplit,
            Workspace(step.q.device),
        )


def test_more_programs_than_a_grid_is_wide_give_the_same_bits(
    scattered: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(VERIFY, scattered, heads=3, kv_heads=1, dtype=torch.bfloat16)
    spread, whole = step.run(spread=True), step.run()
    monkeypatch.setattr(attention, "_GRID_LIMIT", 3)  # 5 items and 4 tiles
    assert torch.equal(step.run(spread=True), spread)
    assert torch.equal(step.run(), whole)


def test_items_are_the_splits_of_each_tile_and_the_device_lists_the_same() -> None:
    spans = [Span(0, 95, 1, 0), Span(1, 3, 1, 1), Span(2, 31, 1, 2), Span(3, 32, 1, 3)]
    made = make_tiles(spans, 1, torch.device("cpu"), split=32)
    assert made.items_2I is not None
    assert made.items_2I.tolist() == [[0, 0, 0, 1, 1, 2, 3], [0, 1, 2, 0, 1, 0, 0]]
    assert made.table_5N[4].tolist() == [0, 3, 5, 6]
    padded = torch.cat((made.table_5N, torch.zeros(5, 2, dtype=torch.int32)), 1)
    padded[4] = 0
    items = torch.zeros(2, 70, dtype=torch.int32)  # more than one program lists
    list_items(padded, items, 32)
    assert items[:, :7].tolist() == made.items_2I.tolist()
    assert set(items[0, 7:].tolist()) == {-1}
    assert padded[4].tolist() == [0, 3, 5, 6, 7, 7]
    short = make_tiles(spans[1:3], 1, torch.device("cpu"), split=32)
    assert short.items_2I is None, "each tile has one split"


def test_a_workspace_keeps_what_it_gave_away() -> None:
    space = Workspace(torch.device("cpu"))
    first = space.get(10)
    assert space.get(8).data_ptr() == first.data_ptr()
    second = space.get(11)
    assert second.numel() == 20
    assert second.data_ptr() != first.data_ptr()


def mixtures() -> Iterator[Any]:
    """Each pair of heads and spans once, so that any two of the four choices meet: 20 of 80."""
    for h, heads in enumerate([(2, 2), (6, 2), (8, 2), (8, 1), (14, 2)]):
        for s, spans in enumerate([DECODE, VERIFY, PREFILL, [(95, 34), (0, 1), (130, 3)]]):
            block, dtype = ((16, torch.float32), (32, torch.bfloat16))[(h + s) % 2]
            window = (0, 33)[(h + s // 2) % 2]
            yield pytest.param(*heads, spans, block, dtype, window)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "spans", "block", "dtype", "window"), list(mixtures())
)
def test_every_mixture_is_attention_and_splits_change_no_bit(
    scattered: Tables,
    sdpa: Reference,
    spans: list[tuple[int, int]],
    window: int,
    block: int,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
) -> None:
    step = Step(spans, scattered, heads=heads, kv_heads=kv_heads, dim=32, block=block, dtype=dtype)
    cut = AttentionConfig(32, 16, 64, num_warps=4, num_stages=2)
    merged = step.run(cut=cut, window=window)
    close(merged, step.expected(sdpa, window))
    assert torch.equal(step.run(cut=cut, spread=True, window=window), merged)
