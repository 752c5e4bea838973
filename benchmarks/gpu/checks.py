"""Checks of the kernels on this device; each gives ``None``, or a description of the fault."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from baton.engine.cuda.decode_graphs import DecodeRow
from baton.engine.cuda.decoder import CudaDecoder
from baton.engine.cuda.kernels.attention import Span, Workspace, make_tiles, paged_attention
from baton.engine.cuda.kernels.configs import AttentionConfig, attention_config
from baton.engine.cuda.kernels.products import Products, rows_to_fp8, to_fp8
from baton.engine.cuda.kernels.rows import add_norm, cuts, gate_mul, rope_write, sample_tokens
from benchmarks.gpu.decode_loop import DecodeLoop
from benchmarks.gpu.model import BLOCK, Machine, random_decoder, scattered_tables

Result = tuple[str, str | None]
Attend = Callable[..., None]

# (heads, KV heads, head dim, window); compiling each takes seconds, so not all combinations
SHAPES = ((32, 8, 128, 0), (32, 8, 128, 24), (6, 2, 64, 0), (2, 2, 64, 24), (8, 1, 256, 0))
SPANS = {
    "decode": [(1000, 1), (0, 1), (255, 1)],
    "verify": [(700, 5), (0, 2), (511, 3)],
    "prefill": [(0, 333), (290, 185), (0, 1)],
}
# (heads, KV heads, head dim): 4, 3, 1, 4 and 8 heads for each KV head
POSITION_SHAPES = ((32, 8, 128), (9, 3, 64), (8, 8, 64), (4, 1, 256), (64, 8, 128))
POSITIONS = 2048
SMOKE_SHAPES = ((3, 1, 16, 0), (3, 1, 16, 24))
SMOKE_SPANS = {
    "decode": [(40, 1), (0, 1), (15, 1)],
    "verify": [(37, 4), (0, 2)],
    "prefill": [(0, 21), (29, 11)],
}
SMOKE_POSITION_SHAPES = ((4, 1, 16), (3, 1, 16), (1, 1, 16))
SMOKE_POSITIONS = 100


def checks(machine: Machine) -> Iterator[Result]:
    """Run all checks, one by one."""
    for heads, kv_heads, dim, window in SMOKE_SHAPES if machine.smoke else SHAPES:
        for name, spans in (SMOKE_SPANS if machine.smoke else SPANS).items():
            title = f"{name}, {heads}/{kv_heads} heads of {dim}, window {window}"
            yield title, _attention(machine, spans, heads, kv_heads, dim, window)
    yield from position_checks(machine)
    yield "rows: norms, gates, biased and normed heads with RoPE", _rows(machine)
    yield "products: exact, and with fp8 weights", _products(machine)
    yield "samples: the largest logit, and independent noise of each row", _draws(machine)
    yield from _decoder(machine)


def _off(got: torch.Tensor, expected: torch.Tensor, limit: float) -> float:
    """Return the relative error of a result, or 0 within the limit."""
    error = float((got.float() - expected.float()).norm() / expected.float().norm())
    return 0.0 if error <= limit else error  # NaN is off


def _rows(machine: Machine) -> str | None:
    device = machine.device
    dtype = machine.dtype
    generator = torch.Generator(device).manual_seed(7)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    count, width, heads, kv_heads, dim = (
        (3, 40, 3, 2, 12) if machine.smoke else (67, 4096, 32, 8, 128)
    )
    limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
    eps = 1e-5
    x = noise(count, width)
    delta = noise(count, width)
    weight = noise(width)
    post = noise(width)
    for after in (None, post):
        added = delta if after is None else F.rms_norm(delta, (width,), after, eps)
        total = x.clone()
        normed = add_norm(total, delta, weight, eps, dtype, after)
        if error := _off(total, x + added, 1e-5) or _off(
            normed, F.rms_norm(x + added, (width,), weight, eps), limit
        ):
            return f"a norm is off by {error:.2g}"
    gate_up = noise(count, 2 * width).to(dtype)
    gate, up = gate_up.float().chunk(2, 1)
    for gelu in (False, True):
        expected = (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up
        if error := _off(gate_mul(gate_up, gelu=gelu), expected, limit):
            return f"a gate is off by {error:.2g}"
    qkv = noise(count, (heads + 2 * kv_heads) * dim).to(dtype)
    bias = noise(qkv.shape[1])
    norm = noise(heads + kv_heads, dim)
    angles = noise(count, dim // 2)
    parts = (qkv.float() + bias).view(count, -1, dim)
    turning = F.rms_norm(parts[:, : heads + kv_heads], (dim,), None, eps) * norm
    pairs = torch.view_as_complex(turning.view(count, heads + kv_heads, -1, 2))
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)[:, None])
    turned = turned.reshape(count, -1, dim)
    rotation = torch.stack((angles.cos(), angles.sin()), -1)
    places = torch.arange(count, dtype=torch.int32, device=device)
    table = torch.arange(-(-count // 16), dtype=torch.int32, device=device).view(1, -1)
    pool = torch.zeros(2, table.shape[1], 16, kv_heads, dim, dtype=dtype, device=device)
    rope_write(qkv, heads, places, places * 0, rotation, table, pool, bias=bias, norm=norm, eps=eps)
    k, v = pool.view(2, -1, kv_heads, dim)[:, :count]
    for got, expected in (
        (qkv.view(count, -1, dim)[:, :heads], turned[:, :heads]),
        (k, turned[:, heads:]),
        (v, parts[:, heads + kv_heads :]),
    ):
        if error := _off(got, expected, limit):
            return f"the heads are off by {error:.2g}"
    return None


def _products(machine: Machine) -> str | None:
    """Compare ``exact`` with torch and itself, and fp8 with the values of its weights."""
    device = machine.device
    dtype = machine.dtype
    generator = torch.Generator(device).manual_seed(8)
    outputs, inputs, count = (32, 48, 5) if machine.smoke else (1024, 4096, 300)
    x = torch.randn(count, inputs, generator=generator, device=device).to(dtype)
    w = torch.randn(outputs, inputs, generator=generator, device=device).to(dtype)
    narrow = to_fp8(w)
    widened = narrow.values_NE.float() * narrow.scale_N[:, None]
    rounded, known = rows_to_fp8(x), to_fp8(x)
    for got, want in (
        (rounded.values_NE.view(torch.uint8), known.values_NE.view(torch.uint8)),
        (rounded.scale_N, known.scale_N),
    ):
        if not torch.equal(got, want):
            return "rows rounded to fp8 by the kernel differ from torch's"
    exact = Products(exact=True)
    fast = Products(exact=False)
    limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for name, weight, values in (("plain", w, w.float()), ("fp8", narrow, widened)):
        expected = x.float() @ values.t()
        whole = exact(x, weight)
        if error := _off(whole, expected, limit):
            return f"exact, {name}: off by {error:.2g}"
        for rows in (slice(0, 1), slice(3, 5), slice(count // 3, count)):
            if not torch.equal(exact(x[rows].contiguous(), weight), whole[rows]):
                return f"exact, {name}: rows {rows.start} to {rows.stop - 1} have other bits alone"
        if error := _off(fast(x, weight), expected, 0.04 if name == "fp8" else limit):
            return f"fast, {name}: off by {error:.2g}"
    return None


def _draws(machine: Machine) -> str | None:
    device = machine.device
    vocabulary = machine.shape.vocab_size
    generator = torch.Generator(device).manual_seed(9)
    logits = torch.randn(6, vocabulary, generator=generator, device=device)
    zeros = torch.zeros(6, dtype=torch.int64, device=device)
    if not torch.equal(
        sample_tokens(logits, zeros.double(), zeros, zeros, zeros), logits.argmax(-1)
    ):
        return "a greedy sample is not the largest logit"
    seeds = torch.arange(6, device=device)
    hot = torch.ones(6, dtype=torch.float64, device=device)
    drawn = sample_tokens(logits, hot, seeds, zeros, seeds + 5)
    for row in range(6):
        one = slice(row, row + 1)
        alone = sample_tokens(
            logits[one].contiguous(), hot[one], seeds[one], zeros[one], seeds[one] + 5
        )
        if int(alone) != int(drawn[row]):
            return "a row alone samples another token than in its batch"
    count = min(50, vocabulary // 2)
    top_ks = torch.full_like(zeros, count).int()
    ones = torch.ones_like(hot)
    least = cuts(logits, hot, top_ks, ones, ones * 0)
    if not torch.equal(least, logits.topk(count).values[:, -1]):
        return f"top_k {count} does not end at the logit of that rank"
    weights = logits.double().softmax(-1)
    left = (weights * (logits >= cuts(logits, hot, top_ks * 0, ones / 2, ones * 0)[:, None])).sum(
        -1
    )
    if not bool(((left >= 0.5) & (left < 0.5 + weights.amax(-1))).all()):
        return "top_p 0.5 does not leave half of the probability"
    flat = torch.zeros(6, vocabulary, device=device)
    same = sample_tokens(flat, hot, seeds, zeros, zeros).tolist()
    return None if len(set(same)) > 1 else "the noise does not depend on the seed"


def _oracle(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int
) -> torch.Tensor:
    keys = torch.arange(k.shape[0], device=q.device)
    positions = torch.arange(start, start + q.shape[0], device=q.device).view(-1, 1)
    seen = keys <= positions
    if window:
        seen &= keys > positions - window
    q, k, v = (x.float().transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return out[0].transpose(0, 1)


def _attention(
    machine: Machine,
    spans: Sequence[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dim: int,
    window: int,
) -> str | None:
    """Compare with SDPA; in ``exact``, splits, batches and one program must give equal bits."""
    device = machine.device
    dtype = machine.dtype
    generator = torch.Generator(device).manual_seed(3)
    lengths = [start + count for start, count in spans]
    widths = [-(-length // 16) for length in lengths]
    order = torch.randperm(sum(widths), generator=torch.Generator().manual_seed(3)).tolist()
    pool = torch.full((2, len(order), 16, kv_heads, dim), float("nan"), dtype=dtype, device=device)
    table = torch.zeros(len(spans), max(widths), dtype=torch.int32)
    given: list[Span] = []
    rows = 0
    used = 0
    kvs = []
    for number, ((start, count), width) in enumerate(zip(spans, widths, strict=True)):
        blocks = order[used : used + width]
        table[number, :width] = torch.tensor(blocks, dtype=torch.int32)
        kv = torch.randn(2, start + count, kv_heads, dim, generator=generator, device=device)
        flat = torch.full((2, width * 16, kv_heads, dim), float("nan"), device=device)
        flat[:, : start + count] = kv
        pool[:, blocks] = flat.view(2, width, 16, kv_heads, dim).to(dtype)
        kvs.append(kv.to(dtype))
        given.append(Span(rows, start, count, number))
        rows = rows + count
        used = used + width
    q = torch.randn(rows, heads, dim, generator=generator, device=device).to(dtype)
    tables = table.to(device)

    def run(cut: AttentionConfig, some: Sequence[Span], *, spread: bool) -> torch.Tensor:
        queries = cut.queries(heads // kv_heads)
        tiles = make_tiles(some, queries, device, split=cut.split if spread else 0)
        out = torch.zeros_like(q)
        paged_attention(q, pool, tables, tiles, out, cut, Workspace(device), window=window)
        return out

    parts = zip(given, kvs, strict=True)
    expected = torch.cat(
        [_oracle(q[s.row : s.row + s.count], kv[0], kv[1], s.start, window) for s, kv in parts]
    )
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
    exact = attention_config("decode", dim, exact=True)
    merged = run(exact, given, spread=False)
    decode = attention_config("decode", dim, exact=False)
    prefill = attention_config("prefill", dim, exact=False)
    results = {
        "exact": merged,
        "fast decode": run(decode, given, spread=True),
        "fast prefill": run(prefill, given, spread=False),
    }
    for name, got in results.items():
        worst = float(((got.float() - expected).abs() / (1 + expected.abs())).max())
        if not worst <= limit:  # also true for NaN
            return f"{name} is off by {worst:.2g}"
    if not torch.equal(run(exact, given, spread=True), merged):
        return "exact: splits give other bits than one program"
    for span in given:
        alone = run(exact, [span], spread=True)
        mine = slice(span.row, span.row + span.count)
        if not torch.equal(alone[mine], merged[mine]):
            return "exact: a sequence alone has other bits than in its batch"
    return None


def position_checks(machine: Machine) -> Iterator[Result]:
    """Check that each position alone has the bits that it has in one prefill."""
    positions = SMOKE_POSITIONS if machine.smoke else POSITIONS
    for heads, kv_heads, dim in SMOKE_POSITION_SHAPES if machine.smoke else POSITION_SHAPES:
        kv_tile = attention_config("decode", dim, exact=True).kv_tile
        differing = exact_positions(heads, kv_heads, dim, positions, machine.device)
        fault = None
        if differing:
            residues = sorted({position % kv_tile for position in differing})
            fault = f"{len(differing)} differ, mod {kv_tile}: {', '.join(map(str, residues))}"
        title = f"exact: {positions} positions alone, {heads}/{kv_heads} heads of {dim}"
        yield title, fault


def exact_positions(
    heads: int,
    kv_heads: int,
    dim: int,
    positions: int,
    device: torch.device,
    *,
    attend: Attend = paged_attention,
) -> list[int]:
    """Return the positions whose bits differ between a decode and one prefill of all of them.

    The results are fp32: rounded to bf16, most differences would disappear. Tests of this check
    give another ``attend``, with the positional parameters of ``paged_attention``.
    """
    generator = torch.Generator(device).manual_seed(5)
    cut = attention_config("decode", dim, exact=True)
    blocks = -(-positions // BLOCK)
    pool_shape = (2, blocks, BLOCK, kv_heads, dim)
    pool = torch.randn(pool_shape, generator=generator, device=device).bfloat16()
    # twice the usual size, so that the softmax is not flat
    q = 2 * torch.randn(positions, heads, dim, generator=generator, device=device)
    q = q.bfloat16()
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(5))
    table = order.to(torch.int32).view(1, -1).to(device)

    def run(spans: Sequence[Span], queries: int, split: int) -> torch.Tensor:
        tiles = make_tiles(spans, queries, device, split=split)
        out = torch.full(q.shape, float("nan"), device=device)
        attend(q, pool, table, tiles, out, cut, Workspace(device))
        return out

    prefill = run([Span(0, 0, positions, 0)], cut.queries(heads // kv_heads), 0)
    decodes = [Span(position, position, 1, 0) for position in range(positions)]
    alone = run(decodes, 1, cut.split)
    same = (prefill == alone).all(dim=(1, 2))  # False for NaN, so for rows without a result
    return [position for position, is_same in enumerate(same.tolist()) if not is_same]


def _decoder(machine: Machine) -> Iterator[Result]:
    decoder = random_decoder(machine, 24 if machine.smoke else 256, exact=True)
    yield "decoder, exact: same bits for any chunking and batch", _chunkings(machine, decoder)
    yield "steps launched ahead sample the same tokens as single steps", _ahead(machine, decoder)


def _chunkings(machine: Machine, decoder: CudaDecoder) -> str | None:
    length = 40 if machine.smoke else 700
    tokens = [(7919 * i + 13) % machine.shape.vocab_size for i in range(length)]
    tables = scattered_tables(decoder, 2, length)

    def run(*parts: tuple[int, int, int]) -> torch.Tensor:
        flat: list[int] = []
        spans = []
        for number, (_, start, end) in enumerate(parts):
            spans.append(Span(len(flat), start, end - start, number))
            flat += tokens[start:end]
        batch = decoder.batch(flat, spans, [tables[t] for t, _, _ in parts])
        return decoder.forward(batch)[: parts[0][2] - parts[0][1]].clone()

    whole = run((0, 0, length))
    if not bool(torch.isfinite(whole).all()):
        return "hidden states are not finite"
    cuts = [0, length // 3, length // 2 + 5, length - 8, length - 7, length - 2, length]
    for start, end in pairwise(cuts):
        if not torch.equal(run((1, start, end), (0, 0, min(end, 50))), whole[start:end]):
            return f"positions {start} to {end - 1} computed apart have other bits"
    return None


def _ahead(machine: Machine, decoder: CudaDecoder) -> str | None:
    context, steps = (20, 2) if machine.smoke else (300, 8)
    tables = scattered_tables(decoder, 3, context + steps)
    rows = [
        DecodeRow(7, context - 1, tables[0]),
        DecodeRow(8, context - 9, tables[1], temperature=0.9, seed=11),
        DecodeRow(9, 3, tables[2], temperature=1.5, seed=(1 << 63) + 5),
    ]
    tokens_by_way = []
    for graphs in (True, False):
        loop = DecodeLoop(decoder, max_blocks=max(map(len, tables)), graphs=graphs)
        loop.start(rows)
        for _ in range(steps):
            loop.launch()
        tokens_by_way.append([loop.read() for _ in range(steps)])
    if any(token < 0 for step in tokens_by_way[0] for token in step):
        return "logits are not finite"
    return (
        None
        if tokens_by_way[0] == tokens_by_way[1]
        else f"{tokens_by_way[0]} with graphs, {tokens_by_way[1]} without"
    )
