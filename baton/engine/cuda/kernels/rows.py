"""Launches of the kernels between the matrix products, and of the sampling kernels.

T rows of a step, E hidden size, F feed-forward size, H query heads, K KV heads, D head dim,
V vocabulary, S block table rows

A kernel is compiled several times, for strides and options. No version fuses multiplications and
additions, so that all of them round alike.
"""

# ruff: noqa: N803, N806 - suffixes such as x_TE give shapes

import torch
import triton

from baton.engine.cuda.kernels.device import rows, sampling

_ROPE_HEADS = 4  # heads of one program
_GATE_TILE = 1024
_CUT_TILE = 2048
_DRAW_TILE = 256  # counters of one program, of four tokens each


def add_norm(
    x_TE: torch.Tensor,
    delta_TE: torch.Tensor | None,
    weight_E: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    post_E: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add ``delta`` to the fp32 sum ``x`` in place; return the sum's RMS norm in ``dtype``.

    With ``post_E``, the RMS norm of ``delta`` is added instead.
    """
    out_TE = torch.empty(x_TE.shape, dtype=dtype, device=x_TE.device)
    add_to(x_TE, delta_TE, eps, post_E, weight_E, out_TE)
    return out_TE


def add_to(
    x_TE: torch.Tensor,
    delta_TE: torch.Tensor | None,
    eps: float,
    post_E: torch.Tensor | None,
    weight_E: torch.Tensor | None = None,
    out_TE: torch.Tensor | None = None,
) -> None:
    """Add ``delta`` to the fp32 sum ``x`` in place, and store the sum's norm in ``out``, if any."""
    count, width = x_TE.shape
    padded = triton.next_power_of_2(width)
    rows.add_norm_kernel[(count,)](
        x_TE,
        x_TE if delta_TE is None else delta_TE,
        x_TE if post_E is None else post_E,
        x_TE if weight_E is None else weight_E,
        x_TE if out_TE is None else out_TE,
        width,
        eps,
        ADD=delta_TE is not None,
        POST=post_E is not None,
        NORM=out_TE is not None,
        WIDTH_PAD=padded,
        num_warps=8 if padded >= 4096 else 4,
        enable_fp_fusion=False,
    )


def rope_write(
    qkv: torch.Tensor,
    heads: int,
    positions_T: torch.Tensor,
    sequences_T: torch.Tensor,
    rotation: torch.Tensor,
    tables_SB: torch.Tensor,
    pool_2BTKD: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotate Q in place, rotate K, and store K and V in the pages of each row's sequence.

    Args:
        qkv: Rows ``[T, (H + 2 K) D]``, contiguous.
        heads: Number of query heads H.
        positions_T: Positions, int32.
        sequences_T: Row of the block tables, int32; -1 = a padding row.
        rotation: Cosines and sines, ``[positions, D / 2, 2]`` fp32.
        tables_SB: Block ids, int32.
        pool_2BTKD: K and V of one layer.
        bias: Bias ``[(H + 2 K) D]`` fp32, added first.
        norm: RMS norm ``[H + K, D]`` fp32 of the heads of Q and K before rotation.
        eps: Epsilon of that norm.
    """
    _, _, block, kv_heads, dim = pool_2BTKD.shape
    parts = triton.cdiv(heads, _ROPE_HEADS) + 2 * triton.cdiv(kv_heads, _ROPE_HEADS)
    rows.rope_write_kernel[(qkv.shape[0], parts)](
        qkv,
        positions_T,
        sequences_T,
        rotation,
        tables_SB,
        pool_2BTKD[0],
        pool_2BTKD[1],
        rotation if bias is None else bias,
        rotation if norm is None else norm,
        tables_SB.stride(0),
        eps,
        H=heads,
        K=kv_heads,
        D=dim,
        BLOCK=block,
        HEADS=_ROPE_HEADS,
        D_PAD=triton.next_power_of_2(dim),
        HALF_PAD=triton.next_power_of_2(dim // 2),
        BIASED=bias is not None,
        NORMED=norm is not None,
        num_warps=2,
        enable_fp_fusion=False,
    )


def gate_mul(gate_up: torch.Tensor, *, gelu: bool = False) -> torch.Tensor:
    """Compute ``silu(gate) * up`` of ``[T, 2 F]``, or with ``gelu`` (its tanh form) instead."""
    count = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    out_TF = torch.empty(count, width, dtype=gate_up.dtype, device=gate_up.device)
    grid = (count, triton.cdiv(width, _GATE_TILE))
    rows.gate_kernel[grid](
        gate_up,
        out_TF,
        width,
        GELU=gelu,
        TILE=_GATE_TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out_TF


def sample_tokens(
    logits_SV: torch.Tensor,
    temperatures_S: torch.Tensor,
    seeds_S: torch.Tensor,
    choices_S: torch.Tensor,
    positions_S: torch.Tensor,
    cuts_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample ``[S]`` int64 tokens, equal to ``baton.engine.sampling.sample`` without penalties.

    Args:
        logits_SV: Logits of any float dtype, contiguous.
        temperatures_S: Temperatures, fp64; 0 = greedy.
        seeds_S: Bits of the unsigned seeds, int64.
        choices_S: Numbers of the choices, int64.
        positions_S: Indexes of the sampled tokens, int64.
        cuts_S: Result of ``cuts``; by default nothing is filtered.
    """
    count, vocabulary = logits_SV.shape
    parts = triton.cdiv(vocabulary, 4 * _DRAW_TILE)
    device = logits_SV.device
    scores = torch.empty(count, parts, dtype=torch.float64, device=device)
    tokens = torch.empty(count, parts, dtype=torch.int32, device=device)
    out_S = torch.empty(count, dtype=torch.int64, device=device)
    sampling.draw_kernel[(count, parts)](
        logits_SV,
        temperatures_S,
        seeds_S,
        choices_S,
        positions_S,
        positions_S if cuts_S is None else cuts_S,
        scores,
        tokens,
        vocabulary,
        parts,
        CUT=cuts_S is not None,
        TILE=_DRAW_TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )
    sampling.reduce_draw_kernel[(count,)](
        scores,
        tokens,
        out_S,
        vocabulary,
        parts,
        PARTS_PAD=triton.next_power_of_2(parts),
        enable_fp_fusion=False,
    )
    return out_S


def cuts(
    logits_SV: torch.Tensor,
    temperatures_S: torch.Tensor,
    top_ks_S: torch.Tensor,
    top_ps_S: torch.Tensor,
    min_ps_S: torch.Tensor,
) -> torch.Tensor:
    """Return ``[S]`` fp32: the least logit that a row's filters leave.

    Args:
        logits_SV: Logits, fp32.
        temperatures_S: Temperatures, fp64; 0 = greedy.
        top_ks_S: Limits on the number of tokens, int32; 0 = off.
        top_ps_S: Nucleus probabilities, fp64; 1 = off.
        min_ps_S: Minimum relative probabilities, fp64; 0 = off.
    """
    count, vocabulary = logits_SV.shape
    cuts_S = torch.empty(count, dtype=torch.float32, device=logits_SV.device)
    sampling.cut_kernel[(count,)](
        logits_SV.sort(dim=-1, descending=True).values,
        temperatures_S,
        top_ks_S,
        top_ps_S,
        min_ps_S.log(),
        cuts_S,
        vocabulary,
        TILE=_CUT_TILE,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return cuts_S
