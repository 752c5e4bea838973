"""Rotary position embeddings: the order of pairs, and the angle per token of each pair.

Pairs are adjacent, ``(x0, x1), (x2, x3), ...``, as in Llama's original weights and in its GGUF
files, so that rotation is one complex product. Hugging Face, and GGUF for all other families, store
them in halves; ``pair_rows`` converts them. K in the pool is in adjacent order too.
"""

# ruff: noqa: N803 - suffixes such as q_THD give shapes

import math
from collections.abc import Mapping
from typing import Any

import torch

from baton.model.model_config import ModelConfig

ROPE_ORDER = "adjacent"


def pair_rows(weight_NE: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder rows of Q or K (or elements of a bias) from halves to adjacent pairs."""
    heads = weight_NE.shape[0] // head_dim
    split = weight_NE.view(heads, 2, head_dim // 2, -1)
    return split.transpose(1, 2).reshape(weight_NE.shape)


def unpair_rows(weight_NE: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder rows from adjacent pairs to halves."""
    heads = weight_NE.shape[0] // head_dim
    pairs = weight_NE.view(heads, head_dim // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(weight_NE.shape)


def rope_frequencies(config: ModelConfig, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Return the angle per position of each pair, ``[D / 2]``, fp32, with the model's scaling.

    ``factors`` are divisors ``[D / 2]`` from the model file.
    """
    frequencies = _plain(config.rope_theta, config.head_dim)
    if factors is not None:
        frequencies = frequencies / factors.float()
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling["rope_type"] == "linear":
        return frequencies / float(scaling["factor"])
    if scaling["rope_type"] == "yarn":
        return _yarn(frequencies, config.rope_theta, scaling)
    return _llama3(frequencies, scaling)


def other_frequencies(config: ModelConfig) -> torch.Tensor | None:
    """Return the angles of layers with other ones than ``rope_frequencies``, if there are any.

    These are layers without RoPE, or layers with a window and their own base, never scaled.
    """
    if config.rope_layers:
        return torch.zeros(config.head_dim // 2)
    if config.local_rope_theta is None:
        return None
    return _plain(config.local_rope_theta, config.head_dim)


def rope_magnitude(config: ModelConfig) -> float:
    """Return the factor of rotated pairs: 1, except for ``yarn``."""
    scaling = config.rope_scaling
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if (given := scaling.get("attention_factor")) is not None:
        return float(given)
    factor = float(scaling["factor"])

    def grown(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    whole = scaling.get("mscale")
    part = scaling.get("mscale_all_dim")
    magnitude = grown(whole) / grown(part) if whole and part else grown(1.0)
    return magnitude * float(scaling.get("attn_factor") or 1.0)  # like vLLM and llama.cpp


def _plain(theta: float, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies: torch.Tensor = 1.0 / theta**exponents
    return frequencies


def _llama3(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Stretch long waves, keep short ones, and interpolate between them."""
    factor = float(scaling["factor"])
    low = float(scaling["low_freq_factor"])
    high = float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    waves = 2 * math.pi / frequencies
    smooth = ((original / waves - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def _yarn(frequencies: torch.Tensor, theta: float, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Keep pairs that turn often within the original context, and stretch slow ones."""
    dim = 2 * frequencies.shape[0]
    original = float(scaling["original_max_position_embeddings"])

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_that_turns(float(scaling.get("beta_fast") or 32.0))
    high = pair_that_turns(float(scaling.get("beta_slow") or 1.0))
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    width = high - low or 0.001
    slow = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return frequencies / float(scaling["factor"]) * slow + frequencies * (1 - slow)


def has_other_frequencies(config: ModelConfig, layer: int) -> bool:
    """Return whether ``other_frequencies`` are those of a layer."""
    if config.rope_layers:
        return not config.rope_layers[layer]
    return config.local_rope_theta is not None and any(config.layer_windows[layer : layer + 1])
