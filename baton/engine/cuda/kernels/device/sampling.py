"""Samples the token with the largest logit, or the largest logit / temperature + Gumbel noise.

The noise is that of ``baton/engine/sampling/sample.py``: numpy's Philox4x64-10 with the key (seed,
choice) and a counter whose last word is the position. So a request samples the same tokens on
either device, up to the last bit of a logarithm.
"""

# ruff: noqa: N803 - constexpr are upper case

import triton
import triton.language as tl
from triton.language.random import philox_impl


@triton.jit
def draw_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    choices_ptr,
    positions_ptr,
    cuts_ptr,
    scores_ptr,
    tokens_ptr,
    vocabulary,
    parts,
    CUT: tl.constexpr,
    TILE: tl.constexpr,
):
    """Find the best token of each row's part ``[part * 4 * TILE, ...)`` of the vocabulary.

    ``CUT``: among logits of at least ``cuts``.
    Temperature 0 is greedy. Of equal scores the smallest id wins. ``reduce_draw_kernel`` selects
    the best of the parts. One counter gives the noise of four neighbouring tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane = tl.arange(0, TILE)
    temperature = tl.load(temperatures_ptr + row)
    counter = part * TILE + lane
    greedy = temperature == 0.0
    scale = tl.where(greedy, 1.0, temperature)
    seed = tl.load(seeds_ptr + row).to(tl.uint64, bitcast=True)
    choice = tl.load(choices_ptr + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions_ptr + row).to(tl.uint64, bitcast=True)
    c0 = (counter + 1).to(tl.uint64)  # numpy counts before it draws
    none = c0 * 0
    n0 = none
    n1 = none
    n2 = none
    n3 = none
    if temperature != 0.0:
        n0, n1, n2, n3 = philox_impl(
            c0, none, none, none + position, none + seed, none + choice, 10
        )
    best = tl.full([TILE], float("-inf"), tl.float64)
    token = tl.zeros([TILE], tl.int32) + vocabulary
    for word in tl.static_range(4):
        raw = n0 if word == 0 else (n1 if word == 1 else (n2 if word == 2 else n3))
        uniform = ((raw >> 11) + 1).to(tl.float64) * 1.1102230246251565e-16
        exponential = tl.maximum(-tl.log(uniform), 8.673617379884035e-19)
        noise = -tl.log(exponential)
        ids = counter * 4 + word
        inside = ids < vocabulary
        logit = tl.load(logits_ptr + row * vocabulary + ids, mask=inside, other=float("-inf"))
        score = logit.to(tl.float64) / scale + tl.where(greedy, 0.0, noise)
        if CUT:
            inside = inside & (logit >= tl.load(cuts_ptr + row))
        score = tl.where(inside, score, float("-inf"))
        better = score > best
        token = tl.where(better, ids, token)
        best = tl.where(better, score, best)
    top = tl.max(best, 0)
    tl.store(scores_ptr + row * parts + part, top)
    tl.store(tokens_ptr + row * parts + part, tl.min(tl.where(best == top, token, vocabulary), 0))


@triton.jit
def reduce_draw_kernel(scores_ptr, tokens_ptr, out_ptr, vocabulary, parts, PARTS_PAD: tl.constexpr):
    """Select the best of the parts of each row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_PAD)
    inside = part < parts
    scores = tl.load(scores_ptr + row * parts + part, mask=inside, other=float("-inf"))
    tokens = tl.load(tokens_ptr + row * parts + part, mask=inside, other=vocabulary)
    top = tl.max(scores, 0)
    token = tl.min(tl.where(scores == top, tokens, vocabulary), 0)
    tl.store(out_ptr + row, tl.minimum(token, vocabulary - 1))  # all NaN: any token


@triton.jit
def cut_kernel(
    falling_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    cuts_ptr,
    vocabulary,
    TILE: tl.constexpr,
):
    """Find the least logit that ``min_p``, ``top_k`` and ``top_p`` leave of a row in falling order.

    ``min_ps`` are logarithms. One program reads the row from the left, so sums depend on the row
    alone. All logits equal to the least one stay.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = falling_ptr + row * vocabulary
    temperature = tl.load(temperatures_ptr + row)
    scale = tl.where(temperature == 0.0, 1.0, temperature)
    top = tl.load(row_ptr).to(tl.float64) / scale
    least = top + tl.load(min_ps_ptr + row)
    top_k = tl.load(top_ks_ptr + row)
    limit = tl.where(top_k > 0, tl.minimum(top_k, vocabulary), vocabulary)
    offsets = tl.arange(0, TILE)
    total = tl.sum(tl.zeros([TILE], tl.float64), 0)
    kept = limit * 0
    for start in range(0, vocabulary, TILE):
        ids = start + offsets
        inside = ids < limit
        score = tl.load(row_ptr + ids, mask=inside, other=float("-inf")).to(tl.float64) / scale
        inside = inside & (score >= least)
        total += tl.sum(tl.where(inside, tl.exp(score - top), 0.0), 0)
        kept += tl.sum(inside.to(tl.int32), 0)
    top_p = tl.load(top_ps_ptr + row)
    last = kept - 1
    if top_p < 1.0:
        goal = top_p * total
        reached = total * 0.0
        for start in range(0, vocabulary, TILE):
            ids = start + offsets
            inside = ids < kept
            score = tl.load(row_ptr + ids, mask=inside, other=float("-inf")).to(tl.float64) / scale
            weight = tl.where(inside, tl.exp(score - top), 0.0)
            there = inside & (reached + tl.cumsum(weight, 0) >= goal)
            last = tl.minimum(last, tl.min(tl.where(there, ids, vocabulary), 0))
            reached += tl.sum(weight, 0)
    tl.store(cuts_ptr + row, tl.load(row_ptr + last))
