"""Weight files that are damaged, hostile or cut short: a ModelError names each of them."""

import contextlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from baton.engine.cpu.load import load_model
from baton.engine.loading.open import load_weights, open_weights
from baton.model.artifact import ModelError, resolve_model
from tests.engine.loading.test_loading import DIM, write_directory, write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep converted weights in the test's folder."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_raw(file: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


NORM = "model.norm.weight"
Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    "change",
    [
        lambda h: [],
        lambda h: "text",
        lambda h: 7,
        lambda h: b"[" * 50_000,
        lambda h: b"{",
        lambda h: {**h, "__metadata__": 7},
        lambda h: {**h, NORM: []},
        lambda h: {**h, NORM: {"dtype": "F32", "shape": [64]}},
        lambda h: {**h, NORM: {**h[NORM], "dtype": ["F32"]}},
        lambda h: {**h, NORM: {**h[NORM], "shape": [-8, -8]}},
        lambda h: {**h, NORM: {**h[NORM], "shape": [64.0]}},
        lambda h: {**h, NORM: {**h[NORM], "shape": [1 << 62, 1 << 62]}},
        lambda h: {**h, NORM: {**h[NORM], "data_offsets": [-256, 0]}},
        lambda h: {**h, NORM: {**h[NORM], "data_offsets": [1 << 64, (1 << 64) + 256]}},
        lambda h: {**h, NORM: {**h[NORM], "data_offsets": [0, float("inf")]}},
        lambda h: {**h, NORM: {**h[NORM], "data_offsets": [0, 256]}},  # of another tensor
        lambda h: {name: entry for name, entry in h.items() if name != NORM},  # a hole
    ],
    ids=range(17),
)
def test_a_hostile_header_is_refused_by_name(tmp_path: Path, change: Change) -> None:
    write_directory(tmp_path, shards=1)
    artifact = resolve_model(str(tmp_path))
    file = tmp_path / "model.safetensors"
    header, data = header_of(file)
    write_raw(file, change(header), data)
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read"):
        load_weights(artifact, "bf16")
    with contextlib.suppress(ModelError):  # and nothing worse, when it is looked for first
        resolve_model(str(tmp_path))


def test_bytes_behind_the_last_tensor_are_refused(tmp_path: Path) -> None:
    write_directory(tmp_path, shards=1)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes() + bytes(64))
    with pytest.raises(ModelError, match="64 bytes belong to no tensor"):
        load_weights(resolve_model(str(tmp_path)), "bf16")


def test_a_weight_in_two_files_is_refused(tmp_path: Path) -> None:
    write_directory(tmp_path, shards=2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    both = {**load_file(first), NORM: torch.ones(64)} | load_file(second)
    save_file(both, second)
    with pytest.raises(ModelError, match="is also in another file"):
        load_weights(resolve_model(str(tmp_path)), "bf16")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e300])
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, value: float) -> None:
    weights = write_directory(tmp_path, shards=1)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name].double()
    weights[name][3, 5] = value  # the last one is too large for fp32
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.1\.up contains NaN or Inf"):
        load_model(resolve_model(str(tmp_path)), "fp32", "fast")


def test_a_file_cut_short_while_it_is_read_is_an_error_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_directory(tmp_path / "model", shards=1)
    write_gguf(tmp_path / "tiny.gguf")
    cases = [
        (resolve_model(str(tmp_path / "model")), tmp_path / "model" / "model.safetensors"),
        (resolve_model(str(tmp_path / "tiny.gguf")), tmp_path / "tiny.gguf"),
    ]
    blocked = tmp_path / "file"
    blocked.write_text("no folder for a cache")
    monkeypatch.setenv("BATON_CACHE", str(blocked))
    for artifact, file in cases:
        with open_weights(artifact, "bf16") as weights:
            os.truncate(file, file.stat().st_size // 2)
            with pytest.raises(ModelError, match="cannot be read"):
                for name in list(weights):
                    weights.pop(name)


def test_rope_factors_of_another_width_are_refused(tmp_path: Path) -> None:
    def factors(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.ones(DIM, dtype=np.float32))

    write_gguf(tmp_path / "tiny.gguf", change=factors)
    with pytest.raises(ModelError, match=rf"rope_freqs\.weight is \[{DIM}\], not \[{DIM // 2}\]"):
        load_weights(resolve_model(str(tmp_path / "tiny.gguf")), "bf16")


def test_gguf_tensors_that_overlap_or_share_a_name_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    names = [b"blk.0.ffn_norm.weight", b"blk.1.ffn_norm.weight"]
    twice = tmp_path / "twice.gguf"
    twice.write_bytes(whole.replace(names[0], names[1]))
    with pytest.raises(ModelError, match=r"twice\.gguf.*same name"):
        resolve_model(str(twice))
    place = whole.index(names[0]) + len(names[0]) + 4 + 8 + 4  # one dimension, then its type
    moved = tmp_path / "moved.gguf"
    for offset, message in ((0, "overlap"), (1 << 63, "truncated"), ((1 << 64) - 32, "truncated")):
        moved.write_bytes(whole[:place] + offset.to_bytes(8, "little") + whole[place + 8 :])
        with pytest.raises(ModelError, match=rf"moved\.gguf.*{message}"):
            resolve_model(str(moved))


def test_a_damaged_header_never_escapes_as_another_error(tmp_path: Path) -> None:
    write_directory(tmp_path, shards=1)
    artifact = resolve_model(str(tmp_path))
    file = tmp_path / "model.safetensors"
    whole, generator, refused = file.read_bytes(), random.Random(7), 0
    begin = int.from_bytes(whole[:8], "little") + 8
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(3):
            data[generator.randrange(begin)] = generator.randrange(256)
        file.write_bytes(data)
        try:
            load_weights(artifact, "bf16")
        except ModelError:
            refused += 1
    assert refused > 120  # a blank, or a name of another letter case that nobody needs
