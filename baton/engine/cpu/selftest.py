"""Proof at start that ``exact`` holds on this machine, and the numerics id.

First attention alone, if it is torch's: the cheapest tiling whose bits do not depend on batch and
chunking. Then the loaded model. The numerics id is a digest of computed bits, so two workers with
the same id can transfer KV to each other.
"""

# ruff: noqa: N803 - suffixes such as q_THD give shapes

import math

import torch

from baton.engine.core.plan import PlanRow, StepPlan
from baton.engine.cpu.attention import AttentionTiling, PagedAttention, QuerySpan
from baton.engine.cpu.decoder import Decoder
from baton.engine.cpu.native.attention import native_library
from baton.engine.cpu.native.library import sums_name
from baton.engine.cpu.runner import CpuRunner
from baton.engine.loading.memory import kv_geometry
from baton.engine.models.rope import ROPE_ORDER
from baton.engine.numerics import (
    DTYPES,
    Numerics,
    NumericsSetupError,
    cancelling,
    digest,
    same_bits,
)
from baton.model.model_config import ModelConfig
from baton.types.geometry import BLOCK_TOKENS, KvGeometry

UNIT_TOKENS = 64
_FIXED_TILE = 16
_POSITIONS = 704  # crosses the flash kernel's 512-key split
_LATE_UNIT = 9  # the first after that split
_WINDOW = 512  # longer windows are probed with this length
_MODEL_BLOCKS = 24  # of the pool in which the loaded model is probed
_IDENTITY_TOKENS = 160  # two and a half units


def attention_tiling(
    config: ModelConfig, dtype: str, numerics: Numerics, kv_dtype: str = "", *, split: bool = False
) -> AttentionTiling:
    """Return the tiling of attention on this machine.

    Args:
        config: Numbers of the model.
        dtype: Dtype of the activations.
        numerics: ``exact`` is proved by trying, unless the native kernel is used, which cuts
            nothing.
        kv_dtype: Dtype of the pool, if it differs.
        split: Whether ranks share the heads; then some share may not suit the native kernel.
    """
    c = config
    group = c.num_heads // c.num_kv_heads
    if numerics == "fast":
        return fast_tiling(group)
    if not split and _is_native(c, dtype, kv_dtype):
        return candidate_tilings(group)[0]
    return choose_tiling(c.num_heads, c.num_kv_heads, c.head_dim, dtype, c.window)


def _is_native(config: ModelConfig, dtype: str, kv_dtype: str) -> bool:
    """Return whether the native kernel attends over such a pool, with all heads of the model."""
    geometry = kv_geometry(config, kv_dtype or dtype, 1)
    heads = (config.num_heads, config.num_kv_heads)
    return native_library(geometry, DTYPES[dtype], *heads) is not None


def fast_tiling(group: int) -> AttentionTiling:
    """Return a tiling for ``fast``: exact lengths up to the block, large tiles, no padding."""
    return AttentionTiling(unit=BLOCK_TOKENS, tile=128, align=1, decode_rows=group)


def candidate_tilings(group: int) -> list[AttentionTiling]:
    """Return tilings for ``exact``, cheapest first; in the last all calls have equal rows."""
    tilings = []
    for rows in (1, 4, 8, 16):
        if rows > 1 and rows < group:
            continue
        align = rows // math.gcd(rows, group)
        decode_rows = -(-group // rows) * rows
        tilings.append(
            AttentionTiling(
                unit=UNIT_TOKENS, tile=UNIT_TOKENS, align=align, decode_rows=decode_rows
            )
        )
    fixed = _FIXED_TILE
    tilings.append(
        AttentionTiling(unit=UNIT_TOKENS, tile=fixed, align=fixed, decode_rows=fixed * group)
    )
    return tilings


def choose_tiling(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: str, window: int | None = None
) -> AttentionTiling:
    """Return the cheapest tiling whose bits do not depend on batch and chunking on this machine.

    With a ``window``, layers with and without it are probed.
    """
    for tiling in candidate_tilings(num_heads // num_kv_heads):
        if attention_fault(tiling, num_heads, num_kv_heads, head_dim, dtype, window) is None:
            return tiling
    raise NumericsSetupError(
        f"numerics exact: attention with {num_heads} heads over {num_kv_heads} of {head_dim} in "
        f"{dtype} is not invariant on this machine with {torch.get_num_threads()} threads; "
        "use numerics: fast"
    )


def attention_fault(
    tiling: AttentionTiling,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    window: int | None = None,
) -> str | None:
    """Return what differs between prefill, odd chunks and decode, or ``None``."""
    windows = (None,) if window is None else (None, min(window, _WINDOW))
    for noise in (True, False):
        q, keys, values = probe_data(num_heads, num_kv_heads, head_dim, dtype, noise=noise)
        blocks = _POSITIONS // BLOCK_TOKENS
        geometry = KvGeometry(
            num_layers=1,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_blocks=3 * blocks,
            dtype=dtype,
        )
        pool = torch.zeros(geometry.shape, dtype=DTYPES[dtype])
        inline = list(range(blocks))
        twin = list(range(blocks, 2 * blocks))
        scattered = [2 * blocks + (i * 7) % blocks for i in range(blocks)]
        for table in (inline, twin, scattered):
            pool[0, 0, table] = keys.view(blocks, BLOCK_TOKENS, num_kv_heads, head_dim)
            pool[0, 1, table] = values.view(blocks, BLOCK_TOKENS, num_kv_heads, head_dim)
        for each in windows:
            attention = PagedAttention(pool, geometry, num_heads, tiling, (each,))
            if fault := _compare(attention, q, inline, twin, scattered, all_counts=noise):
                return fault if each is None else f"{fault}, with a window of {each}"
    return None


def probe_data(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: str, *, noise: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return Q ``[T, H, D]``, K and V ``[T * Hkv, D]``; ``noise`` leaves only rounding errors."""
    kind = DTYPES[dtype]
    q_shape = (_POSITIONS * num_heads, head_dim)
    kv_shape = (_POSITIONS * num_kv_heads, head_dim)
    generator = torch.Generator().manual_seed(12)
    if noise:
        q = cancelling(*q_shape, kind, sign=-1.0, seed=13, scale=300.0)
        keys = cancelling(*kv_shape, kind, sign=1.0, seed=11, scale=300.0)
        half = torch.randn(_POSITIONS // 2, 1, num_kv_heads * head_dim, generator=generator)
        values = torch.cat((half, -half), dim=1).view(kv_shape).to(kind)
    else:
        q = torch.randn(q_shape, generator=generator).mul_(3.0).to(kind)
        keys = torch.randn(kv_shape, generator=generator).to(kind)
        values = torch.randn(kv_shape, generator=generator).to(kind)
    return q.view(_POSITIONS, num_heads, head_dim), keys, values


def _compare(
    attention: PagedAttention,
    q_THD: torch.Tensor,
    inline: list[int],
    twin: list[int],
    scattered: list[int],
    *,
    all_counts: bool,
) -> str | None:
    def chunk(start: int, end: int, blocks: list[int]) -> torch.Tensor:
        calls = attention.plan([], [QuerySpan(0, start, end - start, blocks)])
        return attention.run(0, calls, q_THD[start:end])

    def decode(positions: list[int], tables: list[list[int]]) -> torch.Tensor:
        spans = [
            QuerySpan(row, position, 1, table)
            for row, (position, table) in enumerate(zip(positions, tables, strict=True))
        ]
        return attention.run(0, attention.plan(spans, []), q_THD[positions])

    whole = chunk(0, _POSITIONS, inline)
    for start, end in ((0, 1), (0, 77), (77, 79), (79, 257), (257, 258), (258, 600), (600, 704)):
        if not same_bits(chunk(start, end, inline), whole[start:end]):
            return f"a chunk of positions {start} to {end - 1}"
    if not same_bits(chunk(33, 541, scattered), whole[33:541]):
        return "a chunk over scattered blocks"
    # A kernel may treat the last rows of some row counts differently: try all of a tile's.
    for begin in (0, _LATE_UNIT * UNIT_TOKENS) if all_counts else ():
        for count in range(1, UNIT_TOKENS):
            for start in (begin, begin + UNIT_TOKENS - count):
                if not same_bits(chunk(start, start + count, inline), whole[start : start + count]):
                    return f"a chunk of positions {start} to {start + count - 1}"
    for position in (*range(0, 200, 3), *range(480, 560, 5), 639, 640, 703):
        table = scattered if position % 2 else inline
        if not same_bits(decode([position], [table]), whole[position : position + 1]):
            return f"decode at position {position}"
    for first, batch in ((64, 5), (130, 16), (520, 33), (650, 3)):
        positions = sorted(first + i for i in range(batch))
        tables = [scattered if i % 3 else inline for i in range(batch)]
        if not same_bits(decode(positions, tables), whole[positions]):
            return f"a decode batch of {batch} at position {first}"
        if not same_bits(decode(positions[:2], [inline, twin]), whole[positions[:2]]):
            return f"a strided decode batch at position {first}"
    return None


@torch.inference_mode()
def verify_exact(model: Decoder, tiling: AttentionTiling, dtype: str, kv_dtype: str = "") -> None:
    """Prove ``exact`` on the loaded model: the same bits alone, in odd chunks, and in a batch.

    Attention alone was tested when its tiling was chosen.
    """
    for linear in model.linears().values():
        linear.check()
    c = model.config
    runner = _runner(model, tiling, kv_dtype or dtype)
    length = 5 * BLOCK_TOKENS + 3
    tokens = [(7919 * i + 13) % c.vocab_size for i in range(length)]
    tables = [list(range(6)), [6 + (5 * i) % 6 for i in range(6)], list(range(12, 18))]

    def part(table: list[int], start: int, end: int) -> PlanRow:
        return PlanRow(
            sequence_id=table[0],
            tokens=tokens[start:end],
            start=start,
            block_ids=table[: -(-end // BLOCK_TOKENS)],
        )

    whole = runner.hidden(StepPlan((part(tables[0], 0, length),)))[0]
    steps = [
        [part(tables[1], 0, 37), part(tables[2], 0, 64)],
        [part(tables[1], 37, 66), part(tables[2], 64, 65)],
        [part(tables[1], 66, 67), part(tables[2], 65, 66)],
        [part(tables[1], 67, 70), part(tables[2], 66, length)],
        [part(tables[1], 70, 71)],
    ]
    for rows in steps:
        for row, got in zip(rows, runner.hidden(StepPlan(tuple(rows))), strict=True):
            end = row.start + len(row.tokens)
            if not same_bits(got, whole[row.start : end]):
                raise NumericsSetupError(
                    f"numerics exact: positions {row.start} to {end - 1} computed apart differ "
                    f"from one chunk with {torch.get_num_threads()} threads; use numerics: fast"
                )


@torch.inference_mode()
def numerics_id(
    model: Decoder, tiling: AttentionTiling, dtype: str, numerics: Numerics, kv_dtype: str = ""
) -> str:
    """Return the id that two workers must share for their KV and tokens to be interchangeable.

    It contains a digest of computed bits. So it depends on CPU features, library versions and
    number of threads exactly as far as the results do.
    """
    c = model.config
    runner = _runner(model, tiling, kv_dtype or dtype)
    tokens = [(104729 * i + 5) % c.vocab_size for i in range(_IDENTITY_TOKENS)]
    blocks = list(range(_IDENTITY_TOKENS // BLOCK_TOKENS))
    hidden = runner.hidden(
        StepPlan((PlanRow(sequence_id=0, tokens=tokens, start=0, block_ids=blocks),))
    )[0]
    logits = model.logits(hidden[-1:]).raw_SV
    is_uncut = _is_native(c, dtype, kv_dtype)
    cut = sums_name() if is_uncut else f"u{tiling.unit}t{tiling.tile}"
    kinds = "/".join(part for part in (dtype, model.quantisation, kv_dtype) if part)
    return f"{numerics}/{kinds}/{ROPE_ORDER}/{cut}/{digest((hidden, logits))}"


def _runner(model: Decoder, tiling: AttentionTiling, kv_dtype: str) -> CpuRunner:
    geometry = kv_geometry(model.config, kv_dtype, _MODEL_BLOCKS)
    return CpuRunner(model, bytearray(geometry.pool_bytes), geometry, tiling)
