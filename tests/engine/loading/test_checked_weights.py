"""What `baton models check` says of weights, without reading them, is what loading says."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from baton.engine.loading.open import load_weights
from baton.engine.loading.stored_weights import check_weights
from baton.model.artifact import ModelArtifact, ModelError, resolve_model
from fleet.cli.models_check import described_model
from tests.engine import tiny_models as tiny
from tests.engine.loading.test_damaged_files import header_of, write_raw
from tests.engine.loading.test_loading import write_gguf
from tests.engine.loading.test_quantised_tensors import COMPRESSED, compressed, write
from tests.engine.models import test_text_parts as wrappers

Header = dict[str, Any]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep converted weights in the test's folder."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))


def refusal_of(action: Callable[[ModelArtifact], object], path: Path) -> str:
    try:
        action(resolve_model(str(path)))
    except ModelError as error:
        return str(error)
    return ""


def both(path: Path) -> str:
    """The refusal of both; empty if the model is accepted."""
    checked = refusal_of(check_weights, path)
    assert checked == refusal_of(lambda artifact: load_weights(artifact, "bf16"), path)
    return checked


def renamed(header: Header, name: str) -> Header:
    return {f"{key}.old" if key == name else key: entry for key, entry in header.items()}


def reshaped(header: Header, name: str) -> Header:
    shape = header[name]["shape"]
    return {**header, name: {**header[name], "shape": [*shape[:-2], *reversed(shape[-2:]), 1]}}


def retyped(header: Header, name: str) -> Header:
    kind = {"F32": "I32", "I32": "F32", "U8": "I8"}.get(header[name]["dtype"], "F8_E5M2")
    return {**header, name: {**header[name], "dtype": kind}}


def damaged_alike(folder: Path, edits: int = 1) -> None:
    """Damage some tensors of each kind, one after another."""
    file = folder / "model.safetensors"
    header, data = header_of(file)
    kinds: dict[str, str] = {}
    for name in sorted(header.keys() - {"__metadata__"}):
        kinds.setdefault(".".join(part for part in name.split(".") if not part.isdigit()), name)
    generator = random.Random(3)
    for name in kinds.values():
        for edit in generator.sample((renamed, reshaped, retyped), edits):
            write_raw(file, edit(header, name), data)
            is_of_images = any(word in name for word in ("vision", "visual", "multi_modal"))
            assert bool(both(folder)) is not is_of_images, f"{edit.__name__} {name}"


@pytest.mark.parametrize("name", [name for name in tiny.MODELS if "-" not in name])
def test_damaged_weights_of_each_family_are_refused_alike(tmp_path: Path, name: str) -> None:
    folder = tiny.save(tiny.build(name), tmp_path / "model")
    assert both(folder) == ""
    damaged_alike(folder)


@pytest.mark.parametrize("name", wrappers.MODELS)
def test_damaged_weights_beside_images_are_refused_alike(tmp_path: Path, name: str) -> None:
    folder = tiny.save(wrappers.build(name), tmp_path / "model")
    assert both(folder) == ""
    damaged_alike(folder)


@pytest.mark.parametrize("case", ["int4 with zero points", "fp8 by block", "int8 by row"])
def test_damaged_quantised_weights_are_refused_alike(tmp_path: Path, case: str) -> None:
    form, args = COMPRESSED[case]
    write(tmp_path / "model", *compressed(form, **args))
    assert both(tmp_path / "model") == ""
    damaged_alike(tmp_path / "model", 3)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe", "gpt_oss"])
def test_gguf_files_are_checked_as_they_are_loaded(tmp_path: Path, name: str) -> None:
    assert both(tiny.save_gguf(tiny.build(name), tmp_path / "tiny.gguf")) == ""


def test_wrong_gguf_files_are_refused_alike(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_tensor("unknown.weight", tiny.np.ones(32, dtype=tiny.np.float32))

    for number, name in enumerate(("blk.1.attn_q.weight", "output_norm.weight")):
        write_gguf(tmp_path / f"{number}.gguf", leave_out=(name,))
        problem = both(tmp_path / f"{number}.gguf")
        assert f"{name} is missing" in problem
        assert problem in described_model(str(tmp_path / f"{number}.gguf"))[1]
    write_gguf(tmp_path / "more.gguf", change=change)
    assert "1 weights are not part of the family" in both(tmp_path / "more.gguf")


def test_the_check_reads_no_weights_of_a_tied_model(tmp_path: Path) -> None:
    folder = tiny.save(tiny.build("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    artifact = resolve_model(str(folder))
    assert "head" in load_weights(artifact, "bf16"), "another head than the embedding"
    read: list[str] = []
    seen = pytest.MonkeyPatch()
    seen.setattr(
        "baton.model.safetensors_file.StoredTensor.pieces", lambda tensor: read.append(tensor.name)
    )
    with seen.context():
        check_weights(artifact)
    seen.undo()
    assert read == []
