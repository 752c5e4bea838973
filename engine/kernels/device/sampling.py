"""The token with the largest logit, or with the largest logit / temperature + Gumbel noise.

The noise is that of ``engine/sampling.py``: numpy's Philox4x64-10 with the key (seed, choice) and a
counter whose last word is the position, so that a request draws the same tokens on either device,
up to the last bit of a logarithm.
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
    scores_ptr,
    tokens_ptr,
    vocabulary,
    parts,
    TILE: tl.constexpr,
):
    """The best token of each row's part ``[part * 4 * TILE, ...)`` of the vocabulary.

    Temperature 0 is greedy. Equal scores: the smallest id. ``reduce_draw_kernel`` takes the best of
    the parts. One counter gives the noise of four neighbouring tokens.
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
    n0, n1, n2, n3 = none, none, none, none
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
        score = tl.where(inside, score, float("-inf"))
        better = score > best
        token = tl.where(better, ids, token)
        best = tl.where(better, score, best)
    top = tl.max(best, 0)
    tl.store(scores_ptr + row * parts + part, top)
    tl.store(tokens_ptr + row * parts + part, tl.min(tl.where(best == top, token, vocabulary), 0))


@triton.jit
def reduce_draw_kernel(scores_ptr, tokens_ptr, out_ptr, vocabulary, parts, PARTS_PAD: tl.constexpr):
    """The best of the parts."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_PAD)
    inside = part < parts
    scores = tl.load(scores_ptr + row * parts + part, mask=inside, other=float("-inf"))
    tokens = tl.load(tokens_ptr + row * parts + part, mask=inside, other=vocabulary)
    top = tl.max(scores, 0)
    token = tl.min(tl.where(scores == top, tokens, vocabulary), 0)
    tl.store(out_ptr + row, tl.minimum(token, vocabulary - 1))  # all NaN: any token
