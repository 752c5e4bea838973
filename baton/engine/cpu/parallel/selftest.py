"""Proof at start that a model split over ranks computes the bits of the whole model.

Two things could differ: a product's columns, when fewer of them are computed together, and
attention, with fewer heads or fewer queries to a KV head. Both are measured, on data that makes
rounding visible, for the exact shapes of the ranks.
"""

# ruff: noqa: N803, N806 - suffixes such as q_THD give shapes

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from baton.engine.core.split import Split
from baton.engine.cpu.attention import AttentionTiling, PagedAttention, QuerySpan
from baton.engine.cpu.linear import TILE_ROWS, Linear
from baton.engine.cpu.parallel.shard import Shard
from baton.engine.cpu.quantised import Int8Linear
from baton.engine.cpu.selftest import attention_fault, candidate_tilings, fast_tiling, probe_data
from baton.engine.numerics import DTYPES, Numerics, NumericsSetupError, cancelling, same_bits
from baton.model.artifact import ModelConfig
from baton.types.geometry import BLOCK_TOKENS, KvGeometry


@torch.inference_mode()
def prepare_ranks(
    shard: Shard,
    tiling: AttentionTiling,
    dtype: str,
    numerics: Numerics,
    quantisation: str,
) -> None:
    """Choose the tiling of each rank, prove the split unless ``fast``, and wait for the ranks."""
    config = shard.config
    splits = shard.splits
    if numerics == "fast":
        tilings = [fast_tiling(len(s.heads) // len(s.kv_heads)) for s in splits]
    else:
        tilings = exact_tilings(tiling, config, splits, dtype)
        if fault := attention_split_fault(tiling, tilings, config, splits, dtype):
            raise _refusal(len(splits), fault)
        make = Linear if quantisation == "none" else Int8Linear
        if fault := product_split_fault(config, splits, DTYPES[dtype], make):
            raise _refusal(len(splits), fault)
    shard.tilings = tilings
    shard.wait_loaded()


def _refusal(ranks: int, fault: str) -> NumericsSetupError:
    return NumericsSetupError(
        f"tensor_parallel = {ranks} with numerics exact: {fault} differs on this machine; use "
        "another width or numerics: fast"
    )


def exact_tilings(
    whole: AttentionTiling, config: ModelConfig, splits: Sequence[Split], dtype: str
) -> list[AttentionTiling]:
    """Return the tiling of each rank, equal to the whole model's as far as its heads allow."""
    by_shape: dict[tuple[int, int], AttentionTiling] = {}
    for split in splits:
        shape = (len(split.heads), len(split.kv_heads))
        if shape in by_shape:
            continue
        group = shape[0] // shape[1]
        same_group = group * config.num_kv_heads == config.num_heads
        candidates = [whole] if same_group else candidate_tilings(group)
        for tiling in candidates:
            alike = (tiling.unit, tiling.tile) == (whole.unit, whole.tile)
            if (
                alike
                and attention_fault(tiling, *shape, config.head_dim, dtype, config.window) is None
            ):
                by_shape[shape] = tiling
                break
        else:
            raise _refusal(len(splits), f"attention with {shape[0]} heads over {shape[1]}")
    return [by_shape[len(split.heads), len(split.kv_heads)] for split in splits]


def attention_split_fault(
    whole: AttentionTiling,
    tilings: Sequence[AttentionTiling],
    config: ModelConfig,
    splits: Sequence[Split],
    dtype: str,
) -> str | None:
    """Return which heads have other bits on their rank than in the whole model, or ``None``."""
    heads = config.num_heads
    kv_heads = config.num_kv_heads
    dim = config.head_dim
    for noise in (True, False):
        q_THD, keys, values = probe_data(heads, kv_heads, dim, dtype, noise=noise)
        length = q_THD.shape[0]
        geometry = KvGeometry(
            num_layers=1,
            num_kv_heads=kv_heads,
            head_dim=dim,
            num_blocks=length // BLOCK_TOKENS,
            dtype=dtype,
        )
        pool = torch.stack((keys, values)).view(geometry.shape)
        expected = _attend(PagedAttention(pool, geometry, heads, whole), q_THD)
        for split, tiling in zip(splits, tilings, strict=True):
            mine = slice(split.heads.start, split.heads.stop)
            part = PagedAttention(pool, geometry, len(split.heads), tiling, kv_heads=split.kv_heads)
            got = _attend(part, q_THD[:, mine].contiguous())
            if not same_bits(got, expected[:, mine.start * dim : mine.stop * dim]):
                return f"attention of heads {mine.start} to {mine.stop - 1}"
    return None


def _attend(attention: PagedAttention, q_THD: torch.Tensor) -> torch.Tensor:
    length = q_THD.shape[0]
    span = QuerySpan(0, 0, length, range(length // BLOCK_TOKENS))
    return attention.run(0, attention.plan([], [span]), q_THD)


def product_split_fault(
    config: ModelConfig,
    splits: Sequence[Split],
    dtype: torch.dtype,
    make: Callable[[torch.Tensor], Linear] = Linear,
) -> str | None:
    """Return which product has other bits when its columns are computed apart, or ``None``."""
    for name, outputs, inputs, parts in _products(config, splits):
        weight = cancelling(outputs, inputs, dtype, sign=1.0, seed=21)
        x = cancelling(TILE_ROWS, inputs, dtype, sign=-1.0, seed=22)
        expected = make(weight)(x)
        for rank, ranges in enumerate(parts):
            columns = torch.cat([torch.arange(part.start, part.stop) for part in ranges])
            if not same_bits(make(weight[columns])(x), expected[:, columns]):
                return f"{name} of rank {rank} ({len(columns)} of {outputs} columns)"
    return None


def _products(
    config: ModelConfig, splits: Sequence[Split]
) -> Iterator[tuple[str, int, int, Iterable[list[range]]]]:
    """Yield ``(name, outputs, inputs, each rank's columns)``, as the layers stack their weights."""
    c = config
    dim = config.head_dim
    q = c.num_heads * dim
    kv = c.num_kv_heads * dim
    feed = c.intermediate_size

    def times(part: range, size: int, offset: int = 0) -> range:
        return range(offset + part.start * size, offset + part.stop * size)

    def qkv(s: Split) -> list[range]:
        return [times(s.heads, dim), times(s.kv_heads, dim, q), times(s.kv_heads, dim, q + kv)]

    hidden = [[s.hidden] for s in splits]
    yield "qkv", q + 2 * kv, c.hidden_size, map(qkv, splits)
    yield "o", c.hidden_size, q, hidden
    yield "gate_up", 2 * feed, c.hidden_size, ([s.feed, times(s.feed, 1, feed)] for s in splits)
    yield "down", c.hidden_size, feed, hidden
    yield "head", c.vocab_size, c.hidden_size, [[s.vocab] for s in splits]
