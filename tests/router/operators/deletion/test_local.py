"""Deletion on one host: files, batches, and texts in logs that routers are writing."""

import json
import os
import time
from io import BytesIO
from pathlib import Path

import pytest

from baton.config.clients import BatchConfig
from router.frontend.batch.record import BatchRecord
from router.frontend.batch.store import BatchStore
from router.frontend.operators.deletion import local

NOW_MS = 1_800_000_000_000
NOW = "2027-01-15T08:00:00.000+00:00"
LATER = "2027-01-15T08:00:01.000+00:00"


def line(tenant: str = "gone", at: str = NOW, logger: str = "baton.requests", **more) -> bytes:
    fields = {"time": at, "logger": logger, "tenant": tenant, "status": 200}
    return json.dumps({**fields, **more}).encode() + b"\n"


def test_texts_are_blanked_in_place_and_other_lines_stay_as_they_are(tmp_path: Path) -> None:
    log = tmp_path / "router-0.log"
    texts = {"prompt": "the violet armadillo é", "answers": ["armadillo one", "two"]}
    changed = line(**texts)
    refused = line(reason="'armadillo' is no model")
    kept = [
        line("kept", **texts),
        line(at=LATER, **texts),
        line(logger="router", **texts),
        line(prompt=None),
        b'not json, of "gone"\n',
        b'\xff\xfe "gone"\n',
    ]
    log.write_bytes(changed + b"".join(kept) + refused + line(**texts)[:-1])
    before = log.stat()
    with log.open("ab") as writer:
        counts = local.blank_texts(tmp_path, {"gone": NOW_MS, "other": NOW_MS})
        writer.write(b"\n" + line("kept"))
    assert counts == {"gone": 2, "other": 0}
    lines = log.read_bytes().splitlines(keepends=True)
    assert lines[1:7] == kept
    assert json.loads(lines[0]) == {**json.loads(changed), "prompt": "", "answers": []}
    assert json.loads(lines[7]) == {**json.loads(refused), "reason": ""}
    assert lines[-1] == line("kept")
    assert log.stat().st_ino == before.st_ino
    assert local.blank_texts(tmp_path, {"gone": NOW_MS}) == {"gone": 1}, (
        "the line that was unfinished"
    )
    assert local.blank_texts(tmp_path, {"gone": NOW_MS}) == {"gone": 0}


def batch_of(store: BatchStore, name: str, created_s: int, **more) -> BatchRecord:
    record = BatchRecord(
        id=f"batch_{name * 32}",
        tenant="gone",
        endpoint="/v1/completions",
        input_file_id="file-" + name * 32,
        completion_window="24h",
        created_s=created_s,
        expires_s=created_s + 1000,
        **more,
    )
    store.save(record)
    return record


def test_files_and_batches_of_the_time_before_are_deleted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(local, "_CANCEL_LIMIT_S", 0.2)  # no router runs batches here
    store = BatchStore(tmp_path, BatchConfig())
    old_s, new_s = 1_000, 2_000
    store.add_file("gone", BytesIO(b"x"), "a", "batch", old_s, 10**9)
    young = store.add_file("gone", BytesIO(b"x"), "b", "batch", new_s, 10**9)
    others = store.add_file("kept", BytesIO(b"x"), "c", "batch", old_s, 10**9)
    running = batch_of(store, "a", old_s)
    store.path_of(running, "output").write_bytes(b"a part")
    output = store.add_file("gone", BytesIO(b"x"), "d", "batch_output", new_s, 10**9)
    batch_of(store, "b", old_s, state="completed", output_file_id=output.id)
    later = batch_of(store, "c", new_s)
    stray = tmp_path / "gone" / "files" / f"file-{'e' * 32}.data"
    stray.write_bytes(b"left by a dead process")
    os.utime(stray, (old_s, old_s))
    until_ms = 1_500_000
    assert local.delete_files(store, "gone", until_ms) == {
        "files": 2,
        "batches": 1,
        running.id: 1,
    }
    assert store.files("gone") == [young] and store.batches("gone") == [later]
    names = {path.stem for path in (tmp_path / "gone").rglob("*") if path.is_file()}
    assert names == {young.id, later.id}
    assert store.files("kept") == [others]
    assert local.delete_files(store, "gone", until_ms) == {"files": 0, "batches": 0}
    assert local.delete_files(store, "nobody", until_ms) == {"files": 0, "batches": 0}
    assert not (tmp_path / "nobody").exists()


def test_a_running_batch_ends_before_its_files_are_deleted(tmp_path: Path, monkeypatch) -> None:
    store = BatchStore(tmp_path, BatchConfig())
    batch = batch_of(store, "a", 1_000)
    asked: list[bool] = []

    def end(_: float) -> None:
        asked.append(store.is_cancelled(batch))
        batch.cancel(1_001)
        batch.finish(1_001)
        store.save(batch)

    monkeypatch.setattr(time, "sleep", end)
    assert local.delete_files(store, "gone", 1_500_000) == {"files": 0, "batches": 1}
    assert asked == [True]


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_no_logs_are_no_error(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    assert local.blank_texts(tmp_path / folder, {"gone": NOW_MS}) == {"gone": 0}
