"""A real model on one device, as the bench of the CUDA path runs it; here on the CPU."""

import json
from pathlib import Path

import pytest

from benchmarks.gpu import real_model
from tests.engine.tiny_llama import write_llama
from tests.matrix.tiny import write_tiny


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    write_tiny(folder)
    tokenizer = (folder / "tokenizer.json").read_text()
    reference = write_llama(folder)
    (folder / "tokenizer.json").write_text(tokenizer)
    return reference


def test_a_models_tokens_are_compared_alone_together_and_with_a_file(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real_model, "PROMPTS", (*real_model.PROMPTS[:2], "one, two, " * 12))
    first = tmp_path / "first.json"
    options = ["--model", tiny, "--device", "cpu", "--new", "3"]
    assert real_model.main([*options, "--tokens-only", "--out", str(first)]) == 0
    loop = ["--rows", "1,3", "--prompt-tokens", "20", "--steps", "4"]
    second = tmp_path / "second.json"
    assert real_model.main([*options, *loop, "--against", str(first), "--out", str(second)]) == 0
    record = json.loads(second.read_text())
    equal = {
        "answers": 6,
        "equal_answers": 6,
        "tokens": 18,
        "tokens_before_a_difference": 18,
    }
    assert record["against"] == record["alone"] == equal
    assert set(record["step_loop"]) == {"1", "3"}
    assert record["step_loop"]["3"]["tokens_per_s"] > 0
    monkeypatch.setattr(
        real_model, "tokens", lambda _, prompts, step, new: [[step, 1]] * 2 * len(prompts)
    )
    assert real_model.main([*options, *loop]) == 1
    assert "WRONG" in capsys.readouterr().out
    assert real_model.main([*options, *loop, "--numerics", "fast"]) == 0


def test_tokens_after_the_first_difference_do_not_count() -> None:
    found = real_model.compared([[1, 2, 3], [4, 5]], [[1, 9, 3], [4, 5]])
    assert found["equal_answers"] == 1
    assert found["tokens_before_a_difference"] == 3
