"""Loading needs little more memory than the model: at most 1.3 times its final size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.engine.cpu.native.library import load, widens_bf16
from baton.engine.loading.open import load_weights
from baton.engine.loading.safetensors_data import write_safetensors
from baton.engine.models.families import weight_table
from baton.model.artifact import ModelArtifact, resolve_model
from tests.engine.conftest import GEMMA, MODEL
from tests.engine.cpu.integer_kernel import needs_integer_products

LIMIT = 1.3
PROGRAM = """
import gc, json, sys
from pathlib import Path
import psutil, torch
from baton.engine.cpu.load import load_model
from baton.engine.cpu.quantised import packer
from baton.model.artifact import resolve_model

torch.set_num_threads(1)
artifact = resolve_model(sys.argv[1])
torch.nn.functional.linear(torch.randn(300, 300), torch.randn(300, 300))
packer(sys.argv[3], sys.argv[2])  # its kernels are not the model's
gc.collect()
before = psutil.Process().memory_info().rss
Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
stages = []
with torch.inference_mode():
    model = load_model(
        artifact, sys.argv[2], "fast", quantisation=sys.argv[3],
        progress=lambda stage, done, total: stages.append(stage),
    )
gc.collect()
after = psutil.Process().memory_info().rss
status = Path("/proc/self/status").read_text().split("VmHWM:")[1]
peak = 1024 * int(status.split()[0])
print(json.dumps({"size": after - before, "peak": peak - before, "stages": sorted(set(stages))}))
"""


# bytes of a weight in the layers, of one in the embedding, and of one in the head
KINDS = {
    ("bf16", "none"): (2, 2, 2),
    ("fp32", "none"): (4, 4, 4),
    ("bf16", "int8"): (1, 2, 1),
    ("fp32", "int8"): (1, 4, 1),
    ("bf16", "int4"): (0.625, 2, 1),
}
if load() is None and widens_bf16():
    KINDS["bf16", "none"] = (4, 2, 4)
CASES = [
    pytest.param(kind, marks=[] if kind[1] == "none" else needs_integer_products, id="-".join(kind))
    for kind in KINDS
]


def check(artifact: ModelArtifact, kind: tuple[str, str], cache: Path, stages: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, artifact.source, *kind],
        env={**os.environ, "BATON_CACHE": str(cache)},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = json.loads(done.stdout)
    c = artifact.config
    rows = c.vocab_size * c.hidden_size
    rest = sum(
        entry.shape[0] * entry.shape[1]
        for entry in weight_table(c, "safetensors")
        if len(entry.shape) == 2 and entry.name not in ("embed", "head")
    )
    weights = sum(n * size for n, size in zip((rest, rows, rows), KINDS[kind], strict=True))
    assert found["stages"] == stages
    assert 0.99 < found["size"] / weights < 1.1
    assert found["peak"] <= LIMIT * found["size"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("reference", [MODEL, GEMMA], ids=["smollm2", "gemma3"])
def test_the_peak_of_a_gguf_file_stays_near_the_final_size(
    tmp_path: Path, gemma: ModelArtifact, reference: str, kind: tuple[str, str]
) -> None:
    artifact = resolve_model(reference)
    for stages in (["convert", "read"], ["read"]):  # then from the cache of converted weights
        check(artifact, kind, tmp_path, stages)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> ModelArtifact:
    """SmolLM2's weights as safetensors, in two files."""
    folder, artifact = tmp_path_factory.mktemp("model"), resolve_model(MODEL)
    c, weights = artifact.config, load_weights(artifact, "bf16")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "intermediate_size": c.intermediate_size,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_context_tokens,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    table, index = weight_table(c, "safetensors"), {}
    for number in range(2):
        part = {entry.source: weights[entry.name] for entry in table[number::2]}
        layout = {name: (weight.dtype, tuple(weight.shape)) for name, weight in part.items()}
        write_safetensors(folder / f"{number}.safetensors", layout, part.values())
        index |= dict.fromkeys(part, f"{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return resolve_model(str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_the_peak_of_safetensors_stays_near_the_final_size(
    tmp_path: Path, directory: ModelArtifact, kind: tuple[str, str]
) -> None:
    check(directory, kind, tmp_path, ["read"])
