"""Baseline for measurements: a Llama in plain torch with a dense cache.

A preallocated cache of equal lengths, fused QKV and gate-up, eager kernels, SDPA, greedy. No
scheduler, no paging, no exact numerics. It is optimised for speed.
"""

# ruff: noqa: N803, N806 - suffixes such as q_BHTD give shapes

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from baton.engine.models.rope import unpair_rows
from baton.model.artifact import ModelConfig


class DenseLlama:
    """Llama model over a dense cache ``[layer][k|v][batch, heads, tokens, dim]``."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, torch.Tensor],
        max_batch: int,
        max_tokens: int,
    ) -> None:
        c = self.config = config
        w = weights
        self.embed = w["embed"]
        self.head = w.get("head", w["embed"])
        dtype = self.embed.dtype  # also of the norms: torch fuses only then
        self.final_norm = w["final_norm"].to(dtype)
        self.layers = []
        for i in range(c.num_layers):
            p = f"layers.{i}."
            q, k = (unpair_rows(w[p + name], c.head_dim) for name in ("q", "k"))
            self.layers.append(
                (
                    w[p + "attn_norm"].to(dtype),
                    torch.cat((q, k, w[p + "v"])),
                    w[p + "o"],
                    w[p + "mlp_norm"].to(dtype),
                    torch.cat((w[p + "gate"], w[p + "up"])),
                    w[p + "down"],
                )
            )
        shape = (c.num_layers, 2, max_batch, c.num_kv_heads, max_tokens, c.head_dim)
        self.cache = torch.randn(shape, dtype=torch.float32).to(dtype)
        exponents = torch.arange(0, c.head_dim, 2) / c.head_dim
        angles = torch.outer(torch.arange(max_tokens), 1.0 / c.rope_theta**exponents)
        self.cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(dtype)
        self.sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(dtype)

    @torch.inference_mode()
    def step(self, tokens_BT: torch.Tensor, start: int) -> torch.Tensor:
        """Compute ``tokens_BT`` at positions ``start ...``; return the next tokens ``[B, 1]``."""
        c = self.config
        batch, count = tokens_BT.shape
        end = start + count
        dim = c.head_dim
        eps = c.rms_norm_eps
        cos = self.cos[start:end, None]
        sin = self.sin[start:end, None]
        rotated_heads = c.num_heads + c.num_kv_heads
        x = F.embedding(tokens_BT, self.embed)
        for layer, (attn_norm, qkv_w, o_w, mlp_norm, gate_up_w, down_w) in enumerate(self.layers):
            h = F.rms_norm(x, (c.hidden_size,), attn_norm, eps)
            qkv = F.linear(h, qkv_w).view(batch, count, -1, dim)
            qk = qkv[:, :, :rotated_heads]
            half = torch.cat((qk[..., dim // 2 :], qk[..., : dim // 2]), dim=-1)
            qk = (qk * cos).add_(half.mul_(sin))
            q_BHTD = qk[:, :, : c.num_heads].transpose(1, 2)
            k_cache = self.cache[layer, 0, :batch]
            v_cache = self.cache[layer, 1, :batch]
            k_cache[:, :, start:end] = qk[:, :, c.num_heads :].transpose(1, 2)
            v_cache[:, :, start:end] = qkv[:, :, rotated_heads:].transpose(1, 2)
            a_BHTD = F.scaled_dot_product_attention(
                q_BHTD,
                k_cache[:, :, :end],
                v_cache[:, :, :end],
                is_causal=count > 1,
                enable_gqa=True,
            )
            x = x + F.linear(a_BHTD.transpose(1, 2).reshape(batch, count, -1), o_w)
            h = F.rms_norm(x, (c.hidden_size,), mlp_norm, eps)
            gate, up = F.linear(h, gate_up_w).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate).mul_(up), down_w)
        h = F.rms_norm(x[:, -1], (c.hidden_size,), self.final_norm, eps)
        return F.linear(h, self.head).max(dim=-1, keepdim=True).indices
