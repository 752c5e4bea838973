"""Search for better tile sizes, printed as rows for ``baton/engine/cuda/kernels/configs.py``."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from baton.engine.cuda.kernels.attention import Span, Workspace, make_tiles, paged_attention
from baton.engine.cuda.kernels.configs import AttentionConfig, LinearConfig, attention_config
from baton.engine.cuda.kernels.products import fixed_linear
from benchmarks.gpu.model import BLOCK, Machine, layer_products

ROWS = (1, 8, 16, 32, 64, 128, 256)
MARGIN = 0.97  # our kernel replaces cuBLAS only if it takes less than this share of its time


def tune(machine: Machine, report: Any) -> None:
    """Tune attention for decode and prefill, then the four products of a layer."""
    smoke = machine.smoke
    for batch, context in ((2, 40),) if smoke else ((1, 32768), (32, 4096), (256, 1024)):
        spans = [Span(i, context - 1, 1, i) for i in range(batch)]
        _attention(machine, report, "decode", spans, context)
    context = 24 if smoke else 8192
    _attention(machine, report, "prefill", [Span(0, 0, context, 0)], context)
    for name, (outputs, inputs) in layer_products(machine.shape).items():
        for rows in ROWS[:1] if smoke else ROWS:
            if report.left_s < 0:
                report.skip("tune", f"{name}, {rows} rows", "out of time")
            else:
                _linear(machine, report, f"{name}, {rows} rows", rows, outputs, inputs)


def _attention_cuts(machine: Machine, kind: str) -> Iterable[AttentionConfig]:
    base = attention_config("decode" if kind == "decode" else "prefill", 128, exact=False)
    if machine.smoke:
        yield replace(base, block_m=16, kv_tile=16)
        return
    tiles = (16,) if kind == "decode" else (64, 128)
    # a split is part of the order of summation: one size for every kind of work
    splits = (512, 1024) if kind == "decode" else (0,)
    warps_tried = (2, 4) if kind == "decode" else (4, 8)
    # Triton halves the stages of loads through a block table: from 5 on, tiles are in flight
    for m, n, split, warps, stages in product(tiles, (32, 64, 128), splits, warps_tried, (2, 3, 5)):
        yield AttentionConfig(m, n, split, num_warps=warps, num_stages=stages)


def _attention(machine: Machine, report: Any, kind: str, spans: list[Span], context: int) -> None:
    s = machine.shape
    device = machine.device
    dtype = machine.dtype
    width = -(-context // BLOCK)
    pool_shape = (2, len(spans) * width, BLOCK, s.num_kv_heads, s.head_dim)
    pool = torch.randn(pool_shape, device=device, dtype=dtype)
    order = torch.randperm(len(spans) * width).to(torch.int32)
    tables = order.view(len(spans), width).to(device)
    rows = sum(span.count for span in spans)
    q = torch.randn(rows, s.num_heads, s.head_dim, device=device, dtype=dtype)
    out = torch.empty_like(q)
    space = Workspace(device)
    timed_cuts = []
    for cut in _attention_cuts(machine, kind):
        if report.left_s < 0:
            break
        queries = 1 if kind == "decode" else cut.queries(s.num_heads // s.num_kv_heads)
        split = cut.split if kind == "decode" else 0
        tiles = make_tiles(spans, queries, device, split=split)
        work = partial(paged_attention, q, pool, tables, tiles, out, cut, space)
        seconds = _try(machine, work)
        if seconds is not None:
            timed_cuts.append((seconds, cut))
    case = f"{kind}, {len(spans)} x {context}"
    if not timed_cuts:
        report.skip("tune", case, "no tile sizes ran in time")
        return
    timed_cuts.sort(key=lambda pair: pair[0])
    seconds, best = timed_cuts[0]
    moved = pool.numel() * pool.element_size() / seconds / 1e9
    report.add(
        "tune", case, f"{1e6 * seconds:.0f} us, {moved:.0f} GB/s of KV: {best}", us=1e6 * seconds,
        cut=str(best), others=[f"{1e6 * t:.0f} us {c}" for t, c in timed_cuts[1:4]],
    )  # fmt: skip


def _linear(machine: Machine, report: Any, case: str, rows: int, outputs: int, inputs: int) -> None:
    x = torch.randn(rows, inputs, device=machine.device, dtype=machine.dtype)
    # several weights in turn, so that none stays in the cache
    weights = [
        torch.randn(outputs, inputs, device=machine.device, dtype=machine.dtype)
        for _ in range(1 if machine.smoke else 4)
    ]

    def through(cut: LinearConfig | None) -> None:
        for weight in weights:
            F.linear(x, weight) if cut is None else fixed_linear(x, weight, cut, machine.dtype)

    theirs = _try(machine, partial(through, None)) or float("inf")
    cuts = [LinearConfig(16, 16, 32, num_warps=4, num_stages=2)]
    if not machine.smoke:
        m_tiles = [m for m in (16, 32, 64, 128) if m < 2 * rows or m == 16]
        options = product(m_tiles, (16, 32, 64, 128), (64, 128, 256), (4, 8), (3, 4))
        cuts = [LinearConfig(*option) for option in options]
    timed_cuts = []
    for cut in cuts:
        if report.left_s < 0:
            break
        seconds = _try(machine, partial(through, cut))
        if seconds is not None:
            timed_cuts.append((seconds, cut))
    if not timed_cuts:
        report.skip("tune", case, "no tile sizes ran in time")
        return
    ours, best = min(timed_cuts, key=lambda pair: pair[0])
    ratio = ours / theirs
    row = f"({outputs}, {inputs}): ({rows}, {best})" if ratio < MARGIN else "cuBLAS stays"
    report.add("tune", case, f"{ratio:.2f} of cuBLAS's time: {row}", ratio=ratio, cut=str(best))


def _try(machine: Machine, work: Any) -> float | None:
    """Return seconds, or ``None`` if the sizes need more than the device has."""
    from triton.runtime.errors import OutOfResources

    try:
        return machine.replayed(work, 1 if machine.smoke else 5)
    except OutOfResources:
        return None
