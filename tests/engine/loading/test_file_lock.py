"""Weights are converted once, by whoever comes first, also when that one is killed over it."""

import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pytest

from baton.engine.loading.file_lock import exclusively
from tests.engine.loading.test_loading import write_gguf

LOAD = """
import sys
from baton.model.artifact import resolve_model
from baton.engine.loading.open import load_weights
stages = set()
def note(stage, done, total):
    if stage not in stages:
        stages.add(stage)
        print(stage, flush=True)
        if "stop" in sys.argv and stage == "convert":
            sys.stdin.read()
artifact = resolve_model(sys.argv[1])
weights = load_weights(artifact, "bf16", progress=note)
print("sum", sum(float(w.float().sum()) for w in weights.values()))
"""


def loader(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", LOAD, str(folder / "tiny.gguf"), *arguments],
        env={**os.environ, "BATON_CACHE": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_one_of_several_converts_and_the_next_takes_over_from_one_that_was_killed(
    tmp_path: Path,
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    first = loader(tmp_path, "stop")
    assert first.stdout is not None
    assert first.stdout.readline() == "convert\n"  # it has its turn, and stands still
    others = [loader(tmp_path) for _ in range(2)]
    first.kill()
    first.communicate()
    said = [other.communicate(timeout=120)[0].split("\n") for other in others]
    assert sorted("convert" in lines for lines in said) == [False, True]
    assert all("read" in lines for lines in said)
    assert len({lines[-2] for lines in said}) == 1, "the same weights"
    assert [path.suffix for path in (tmp_path / "weights").iterdir()].count(".safetensors") == 1


def test_a_turn_is_waited_for_and_not_for_ever(tmp_path: Path) -> None:
    file = tmp_path / "below" / "lock"
    with exclusively(file):
        began_s = time.monotonic()
        with exclusively(file, limit_s=0.3):  # as others would
            assert time.monotonic() - began_s >= 0.3
        waiting = Thread(target=lambda: exclusively(file, limit_s=20.0).__enter__())
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
    waiting.join(5.0)
    assert not waiting.is_alive()


def test_where_nothing_can_be_written_nobody_waits(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    began_s = time.monotonic()
    with exclusively(tmp_path / "file" / "lock"):
        assert time.monotonic() - began_s < 1.0
