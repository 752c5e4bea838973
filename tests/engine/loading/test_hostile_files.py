"""Random damage to the files of a model: an error names it, soon and in little memory.

BATON_FILE_SEEDS=20000 .venv/bin/pytest -q -s tests/engine/loading/test_hostile_files.py
"""

import json
import os
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from shutil import copytree, rmtree

import pytest
from gguf import GGUFEndian, GGUFWriter

from baton.engine.loading.open import load_weights
from baton.engine.loading.stored_weights import check_weights
from baton.model.artifact import ModelError, resolve_model
from fleet.cli.models_check import described_model
from tests.engine.loading.test_loading import write_directory, write_gguf

SEEDS = int(os.environ.get("BATON_FILE_SEEDS", "45"))
SECONDS = 10.0
MEMORY_BYTES = 1 << 30
HEADER = "model.safetensors"
INDEX = "model.safetensors.index.json"
Damage = Callable[[Path, random.Random], Path]
"""Function that damages the copy of a model; it returns the model's path."""

NUMBERS = (-1, 0, 1, 3, 2**31, 2**53, 2**63, 2**64, 2**200, 0.5, float("inf"), "1", None, [], {})
VALUES = (*NUMBERS, True, "", "x" * 5000, [[]], {"a": 1}, [None] * 9)
DEEP = b"[" * 100_000


def raw_header(length: int, text: bytes, data: bytes = b"") -> bytes:
    return length.to_bytes(8, "little") + text + data


def safetensors(folder: Path, rng: random.Random) -> Path:
    """Offsets, overlaps, dtypes, sizes beyond the file, huge and deep headers, names twice."""
    file = folder / HEADER
    whole = file.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    text, data = whole[8:begin], whole[begin:]
    kind = rng.randrange(8)
    header = json.loads(text)
    name = rng.choice([key for key in header if key != "__metadata__"])
    entry = header[name]
    if kind == 0:
        entry[rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(VALUES)
    elif kind == 1:
        place = rng.choice(["shape", "data_offsets"])
        entry[place][rng.randrange(len(entry[place]))] = rng.choice(NUMBERS)
    elif kind == 2:
        entry["dtype"] = rng.choice(["F8_E5M2", "C64", "BOOL", "F4", "f32", "F64", "I32", "BF16"])
    elif kind == 3:
        header[rng.choice([name, "__metadata__"])] = rng.choice(VALUES)
    elif kind == 4:  # the header is a gigabyte, or a hundred megabytes of the file
        with file.open("wb") as sparse:
            sparse.write(rng.choice([99_000_000, 1 << 30, 1 << 63]).to_bytes(8, "little"))
            sparse.write(rng.choice([b"{", b"[", b'{"a":"', b'{"a":' + DEEP]))
            sparse.truncate(110_000_000)
        return folder
    elif kind == 5:
        own = json.dumps({name: entry}).encode()[1:-1]
        twice = rng.choice([own, own.replace(b"F32", b"F16"), b'"a":' + DEEP, b'"a":1e999'])
        text = b"{" + twice + b"," + text[1:]
        file.write_bytes(raw_header(len(text), text, data))
        return folder
    elif kind == 6:
        file.write_bytes(whole[: rng.randrange(len(whole))])
        return folder
    else:
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            damaged[rng.randrange(begin)] = rng.randrange(256)
        file.write_bytes(damaged)
        return folder
    text = json.dumps(header).encode()
    file.write_bytes(raw_header(len(text), text, data))
    return folder


def links(folder: Path, rng: random.Random) -> Path:
    """Files that are links to themselves, to folders, to pipes, to devices or to nothing."""
    names = [path.name for path in folder.iterdir() if path.is_file()]
    others = ["README.md", "chat_template.jinja", "tokenizer_config.json"]
    file = folder / rng.choice([*names, *others])
    target = rng.choice([file, folder, folder / "none", "/dev/zero", "/dev/null", folder / "pipe"])
    os.mkfifo(folder / "pipe")
    file.unlink(missing_ok=True)
    file.symlink_to(target)
    return rng.choice([folder, folder, file])


def cached(folder: Path, rng: random.Random) -> Path:
    """The Hugging Face cache, in which each file is a link to a blob of another folder."""
    blobs = folder / "blobs"
    blobs.mkdir()
    snapshot = folder / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(path for path in folder.iterdir() if path.is_file())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    if rng.random() < 0.5:
        (blobs / str(rng.randrange(number + 1))).unlink()
    return snapshot


def index(folder: Path, rng: random.Random) -> Path:
    """An index with wrong names, or that is none."""
    (folder / HEADER).rename(folder / "model-00001-of-00001.safetensors")
    right = "model-00001-of-00001.safetensors"
    wrong: list[object] = [
        f"../{folder.name}/{right}",
        f"{folder}/{right}",
        "..",
        ".",
        "",
        "none.safetensors",
    ]
    wrong += ["config.json", "x" * 300, "a\0b", *VALUES]
    place = rng.choice([right, right, rng.choice(wrong)])
    both = {"weight_map": {"a": right, "b": place}}
    whole = rng.choice([both, both, {"weight_map": place}, place])
    text = json.dumps(whole).encode() if rng.random() < 0.9 else DEEP
    (folder / INDEX).write_bytes(text)
    return folder


def texts(folder: Path, rng: random.Random) -> Path:
    """Damage to one of the JSON files, as a value or as bytes."""
    names = ["config", "generation_config", "tokenizer", "tokenizer_config", "added_tokens"]
    file = folder / f"{rng.choice([*names, 'special_tokens_map', 'chat_template'])}.json"
    raw = json.loads(file.read_text()) if file.exists() else {}
    known = ["chat_template", "eos_token", "added_tokens_decoder", "model", "added_tokens"]
    key = rng.choice([*(raw or known), *known, "rope_scaling", "quantization_config"])
    raw[key] = rng.choice(VALUES)
    text = json.dumps(raw).encode()
    file.write_bytes(rng.choice([text, text, text, DEEP, b"", text[:-1], b"\xff" + text]))
    return folder


def gguf(folder: Path, rng: random.Random) -> Path:
    """Cut, big-endian and split files, wrong bytes in the metadata."""
    file = folder / "m.gguf"
    kind = rng.randrange(5)
    if kind == 0:
        writer = GGUFWriter(file, "llama", endianess=GGUFEndian.BIG)
        writer.add_block_count(1)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return file
    if kind == 1:
        parts = sorted((folder / "split").iterdir())
        part = rng.choice(parts)
        cut = rng.choice([None, 0, 24, part.stat().st_size - 1])
        if cut is None:
            part.unlink()
        else:
            os.truncate(part, cut)
        return rng.choice([parts[0], part])
    whole = bytearray(file.read_bytes())
    data = whole.rindex(b"output_norm.weight") + 60
    if kind == 2:
        file.write_bytes(whole[: rng.randrange(len(whole))])
    elif kind == 3:  # a count or length of any size; the file is large enough for it
        at = rng.randrange(8, data)
        whole[at : at + 8] = rng.choice([1 << 20, 1 << 27, 1 << 40, (1 << 64) - 1]).to_bytes(8)
        whole[at : at + 8] = whole[at : at + 8][::-1]
        file.write_bytes(whole)
        os.truncate(file, 1 << 31)
    else:
        for _ in range(rng.randrange(1, 6)):
            whole[rng.randrange(data)] = rng.randrange(256)
        file.write_bytes(whole)
    return file


DAMAGES: tuple[Damage, ...] = (safetensors, links, cached, index, texts, gguf)


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model in all forms."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "whole"
    write_directory(folder, shards=1)
    write_gguf(folder / "m.gguf")
    (folder / "split").mkdir()
    write_gguf(folder / "split" / "s.gguf", part_tensors=8)
    return folder


def verdict(path: Path) -> str:
    """Empty if the weights are loaded; else the refusal, which the check has found, too."""
    try:
        artifact = resolve_model(str(path))
    except ModelError as error:
        return str(error)
    refused = ""
    try:
        check_weights(artifact)
    except ModelError as error:
        refused = str(error)
    try:
        load_weights(artifact, "bf16")
    except ModelError as error:
        found = str(error)
        assert refused == found or "contains NaN or Inf" in found or "cannot be read" in found
        return found
    assert refused == ""
    return ""


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_hostile_files_are_refused_by_name(whole: Path, tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    before = peak_bytes()
    for seed in range(SEEDS):
        damage = DAMAGES[seed % len(DAMAGES)]
        folder = tmp_path / "copy"
        copytree(whole, folder)
        path = damage(folder, random.Random(seed))
        begin = time.process_time()
        described, refused = described_model(str(path))
        found = verdict(path)
        slowest = max(slowest, time.process_time() - begin)
        assert described["model"], seed
        for problem in filter(None, (found, *refused)):
            assert str(folder) in problem or "tokenizer" in problem, (seed, problem)
        outcomes[f"{damage.__name__} {'refused' if found else 'loaded'}"] += 1
        rmtree(folder)
    print(f"\n{SEEDS} seeds, slowest {slowest:.2f} s of CPU: {dict(sorted(outcomes.items()))}")
    memory = peak_bytes() - before
    print(f"peak memory rose by {memory / 2**20:.0f} MiB")
    assert slowest < SECONDS
    assert memory < MEMORY_BYTES
    assert {"cached loaded", "cached refused", "index loaded"} <= outcomes.keys()
