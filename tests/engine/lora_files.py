"""Adapters as PEFT writes them, made by hand: random A and B, and what they come to when merged."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from baton.model.artifact import ModelConfig
from baton.model.lora_artifact import TARGETS, target_shapes

PREFIX = "base_model.model.model.layers"


def module_of(target: str) -> str:
    return "self_attn" if target in TARGETS[:4] else "mlp"


def write_adapter(
    folder: Path,
    config: ModelConfig,
    *,
    rank: int = 8,
    alpha: float = 16,
    targets: tuple[str, ...] = TARGETS,
    layers: tuple[int, ...] | None = None,
    seed: int = 0,
    size: float = 0.02,
    dtype: torch.dtype = torch.float32,
    **settings: object,
) -> Path:
    """Write an adapter; ``settings`` go into its config as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    shapes = target_shapes(config)
    for layer in range(config.num_layers) if layers is None else layers:
        for target in targets:
            outputs, inputs = shapes[target]
            stem = f"{PREFIX}.{layer}.{module_of(target)}.{target}"
            a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            b = torch.randn(outputs, rank, generator=generator) * size
            weights[f"{stem}.lora_A.weight"] = a.to(dtype)
            weights[f"{stem}.lora_B.weight"] = b.to(dtype)
    save_file(weights, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somewhere/else",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "modules_to_save": None,
        "peft_version": "0.17.0",
        "r": rank,
        "target_modules": list(targets),
        "use_dora": False,
        "use_rslora": False,
        **settings,
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
