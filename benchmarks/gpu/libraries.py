"""Own kernels beside the libraries that torch brings: attention over pages, and products.

The libraries read K and V without pages, which a serving engine does not have. The row "gather"
gives the time to copy one layer's pages to such memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch.nn.attention import SDPBackend, sdpa_kernel

from baton.engine.cuda.kernels.attention import Span, Workspace, make_tiles, paged_attention
from baton.engine.cuda.kernels.configs import AttentionConfig, Kind, attention_config
from baton.engine.cuda.kernels.products import Products
from benchmarks.gpu.model import BLOCK, Machine, layer_products

STAGES = (3, 4, 5, 7)
PROMPTS = (2048, 8192, 16384)
# (sequences, context): more KV than the cache holds
DECODES = ((1, 32768), (8, 4096), (32, 4096), (32, 8192), (128, 1024))
ROWS = (1, 8, 32, 128, 512, 4096)
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}
_WEIGHTS = 3  # used in turns: a single one would stay in the cache


def compare(machine: Machine, report: Any) -> None:
    """Measure attention of prefill and decode, then the products of a layer and the head."""
    smoke = machine.smoke
    for tokens in (24,) if smoke else PROMPTS:
        _attention(machine, report, "prefill", [Span(0, 0, tokens, 0)])
    for batch, context in ((2, 40),) if smoke else DECODES:
        spans = [Span(row, context - 1, 1, row) for row in range(batch)]
        _attention(machine, report, "decode", spans)
    shapes = layer_products(machine.shape)
    shapes["head"] = (machine.shape.vocab_size, machine.shape.hidden_size)
    for name, (outputs, inputs) in shapes.items():
        for rows in ROWS[:2] if smoke else ROWS:
            _product(machine, report, f"{name}, {rows} rows", rows, outputs, inputs)


def _seconds(machine: Machine, work: Callable[[], object]) -> float:
    return machine.replayed(work, 1 if machine.smoke else 15)


def _attention(machine: Machine, report: Any, kind: Kind, spans: Sequence[Span]) -> None:
    """Measure one layer of one step; all its sequences have the same length."""
    s = machine.shape
    length = spans[0].start + spans[0].count
    width = -(-length // BLOCK)
    pool_shape = (2, len(spans) * width, BLOCK, s.num_kv_heads, s.head_dim)
    pool = torch.randn(pool_shape, device=machine.device, dtype=machine.dtype)
    tables = torch.randperm(len(spans) * width).to(torch.int32).view(len(spans), width)
    tables = tables.to(machine.device)
    rows = sum(span.count for span in spans)
    q = torch.randn(rows, s.num_heads, s.head_dim, device=machine.device, dtype=machine.dtype)
    out = torch.empty_like(q)
    space = Workspace(machine.device)
    moved = 2 * len(spans) * length * s.num_kv_heads * s.head_dim * machine.dtype.itemsize
    operations = 2 * length * length * s.num_heads * s.head_dim  # causal: half of all pairs

    def copied(work: Callable[[], object]) -> dict[str, Any]:
        seconds = _seconds(machine, work)
        return {"us": 1e6 * seconds, "gb_per_s": 2 * moved / seconds / 1e9}  # read and written

    def figures(work: Callable[[], object]) -> dict[str, Any]:
        seconds = _seconds(machine, work)
        if kind == "prefill":
            return {"us": 1e6 * seconds, "tflop_per_s": operations / seconds / 1e12}
        return {"us": 1e6 * seconds, "gb_per_s": moved / seconds / 1e9}

    def ours(cut: AttentionConfig) -> Callable[[], None]:
        is_decode = kind == "decode"
        queries = 1 if is_decode else cut.queries(s.num_heads // s.num_kv_heads)
        split = cut.split if is_decode else 0
        tiles = make_tiles(spans, queries, machine.device, split=split)
        return partial(paged_attention, q, pool, tables, tiles, out, cut, space)

    case = f"{kind}, {len(spans)} x {length}"
    for exact in (False, True):
        base = attention_config(kind, s.head_dim, exact=exact)
        for stages in STAGES[:1] if machine.smoke else STAGES:
            name = f"{case}: {'exact' if exact else 'fast'}, {stages} stages"
            work = ours(replace(base, num_stages=stages))
            report.run("libraries", name, partial(figures, work))
    order = tables.view(-1)
    gather = partial(pool.index_select, 1, order)
    report.run("libraries", f"{case}: gather", partial(copied, gather))
    shaped = (2, len(spans), width * BLOCK, s.num_kv_heads, s.head_dim)
    flat = gather().view(shaped)[:, :, :length].transpose(2, 3).contiguous()
    q_of = q.view(len(spans), -1, s.num_heads, s.head_dim).transpose(1, 2).contiguous()
    for library, backend in (
        {"math": SDPBackend.MATH}.items() if machine.smoke else BACKENDS.items()
    ):
        theirs = partial(_sdpa, backend, q_of, flat, causal=kind == "prefill")
        report.run("libraries", f"{case}: {library}", partial(figures, theirs))


def _sdpa(backend: SDPBackend, q: torch.Tensor, kv: torch.Tensor, *, causal: bool) -> torch.Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, kv[0], kv[1], is_causal=causal, enable_gqa=True)


def _product(
    machine: Machine, report: Any, case: str, rows: int, outputs: int, inputs: int
) -> None:
    x = torch.randn(rows, inputs, device=machine.device, dtype=machine.dtype)
    weights = [
        torch.randn(outputs, inputs, device=machine.device, dtype=machine.dtype)
        for _ in range(_WEIGHTS)
    ]

    def figures(product: Callable[[torch.Tensor], object]) -> dict[str, Any]:
        def all_of_them() -> None:
            for weight in weights:
                product(weight)

        seconds = _seconds(machine, all_of_them) / len(weights)
        return {
            "us": 1e6 * seconds,
            "tflop_per_s": 2 * rows * outputs * inputs / seconds / 1e12,
            "gb_per_s": outputs * inputs * machine.dtype.itemsize / seconds / 1e9,
        }

    report.run("libraries", f"{case}: cuBLAS", partial(figures, partial(F.linear, x)))
    ours = partial(Products(exact=True), x)
    report.run("libraries", f"{case}: exact", partial(figures, ours))
