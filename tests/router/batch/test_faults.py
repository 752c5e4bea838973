"""Batches on a full disk, behind others, killed in their last moment, and with hostile lines."""

import asyncio
import errno
import io
import json
import os
import shutil
import time
from pathlib import Path
from tempfile import SpooledTemporaryFile

import pytest

from baton.config.clients import BatchConfig
from router.frontend.batch import runner, store
from router.frontend.batch.calls import _Content
from router.frontend.batch.lines import LineFault, read_line
from router.frontend.batch.record import BatchRecord
from router.frontend.batch.store import BatchStore
from tests.router.batch.test_batches import begin, client_of, ended, line, lines, read, start
from tests.router.conftest import until
from tests.router.emulated_worker import Script

__all__ = ["start"]

ONE, TWO = {"x-baton-tenant": "one"}, {"x-baton-tenant": "two"}


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_output(contents: bytes) -> bool:
    return b'"purpose":"batch_output"' in contents


def is_end(contents: bytes) -> bool:
    return b'"state":"completed"' in contents


@pytest.mark.parametrize("is_faulty", [is_output, is_end], ids=["file", "end"])
async def test_a_fault_at_the_end_of_a_batch_loses_no_answer_and_computes_none_again(
    start, monkeypatch, is_faulty
):
    """The answers were moved first: the next try found none, and asked all lines again."""
    monkeypatch.setattr(runner, "_AFTER_FAULT_S", 0.05, raising=False)
    whole, faults = store.replace_file, []

    def write(path, contents):
        if is_faulty(contents) and not faults:
            faults.append(contents)
            raise full_disk()
        whole(path, contents)

    monkeypatch.setattr(store, "replace_file", write)
    fleet = await start()
    async with client_of(fleet) as client:
        done = await ended(client, await begin(client, lines(5) + b"garbage\n"))
        assert done.status == "completed"
        assert done.request_counts.model_dump() == {"total": 6, "completed": 5, "failed": 1}
        answers = await read(client, done.output_file_id)
        assert sorted(answer["custom_id"] for answer in answers) == [f"line-{n}" for n in range(5)]
        assert len(await read(client, done.error_file_id)) == 1
        outputs = [f.id async for f in client.files.list() if f.purpose == "batch_output"]
    assert faults
    assert sorted(outputs) == sorted([done.output_file_id, done.error_file_id])
    assert len(fleet.workers["decode-0"].submissions) == 5


async def test_a_disk_that_is_full_for_a_while_does_not_have_lines_computed_all_the_time(
    start, monkeypatch
):
    from router.frontend.batch.answers import AnswerFiles

    whole, refused = AnswerFiles.write, []

    def write(files, number, text, *, ok):
        if len(refused) < 1000:
            refused.append(number)
            raise full_disk()
        return whole(files, number, text, ok=ok)

    monkeypatch.setattr(AnswerFiles, "write", write)
    fleet = await start(at_once=2)
    async with client_of(fleet) as client:
        begun = await begin(client, lines(9))
        await until(lambda: refused)
        await asyncio.sleep(2.0)
        assert len(fleet.workers["decode-0"].submissions) <= 2
        assert (await client.batches.retrieve(begun.id)).status == "in_progress"


def test_a_file_that_cannot_be_kept_leaves_nothing(tmp_path):
    class Broken(io.BytesIO):
        def read(self, size=-1):
            if self.tell() > 0:
                raise full_disk()
            return super().read(size)

    store = BatchStore(tmp_path, BatchConfig())
    with pytest.raises(OSError, match="space"):
        store.add_file("one", Broken(b"x" * 3_000_000), "a", "batch", 0.0, 100)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (SpooledTemporaryFile, "write"),
        (shutil, "copyfileobj"),
        (store, "replace_file"),
        (BatchStore, "ask_to_cancel"),
    ],
)
async def test_a_full_disk_is_a_413(start, monkeypatch, owner, name, number):
    fleet = await start(script=Script(step_s=0.5))
    form = {"file": ("in.jsonl", lines(1)), "purpose": (None, "batch")}
    body = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    body["input_file_id"] = (await fleet.http.post("/v1/files", files=form)).json()["id"]
    batch = (await fleet.http.post("/v1/batches", json=body)).json()["id"]

    def full(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, full)
        if name == "ask_to_cancel":
            answers = [await fleet.http.post(f"/v1/batches/{batch}/cancel")]
        else:
            answers = [await fleet.http.post("/v1/files", files=form)]
        if name == "replace_file":
            answers.append(await fleet.http.post("/v1/batches", json=body))
    for answer in answers:
        assert answer.status_code == 413, answer.text
        assert "disk has no room" in answer.text


async def test_only_the_routers_user_reads_files(start, tmp_path):
    """Also of an earlier version, which made folders for everyone."""
    (tmp_path / "batch" / "default" / "files").mkdir(parents=True, mode=0o755)
    fleet = await start()
    async with client_of(fleet) as client:
        await ended(client, await begin(client, lines(1) + b"x\n"))
    found = list((tmp_path / "batch").rglob("*"))
    assert len(found) >= 8
    for path in (tmp_path / "batch", *found):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_what_a_killed_router_left_without_a_record_goes_after_a_day(tmp_path):
    store = BatchStore(tmp_path, BatchConfig())
    kept = store.add_file("one", io.BytesIO(b"x"), "a", "batch", time.time(), 10**9)
    folder = tmp_path / "one" / "files"
    strays = [folder / f"file-{'a' * 32}.data", folder / f"{kept.id}.00ff.part"]
    for stray in strays:
        stray.write_bytes(b"x" * 100)
    store.sweep(time.time())
    assert all(stray.exists() for stray in strays)  # it may be about to get one
    store.sweep(time.time() + 25 * 3600)
    assert not any(stray.exists() for stray in strays)
    assert store.file("one", kept.id) is not None
    assert store.data_path("one", kept.id).read_bytes() == b"x"


async def test_a_batch_behind_another_is_cancelled_and_expires_in_time(start, tmp_path):
    fleet = await start(Script(step_s=0.001, prefill_s=0.2), at_once=1)
    store = BatchStore(tmp_path / "batch", BatchConfig())
    async with client_of(fleet) as client:
        first = await begin(client, lines(300))
        await until(lambda: fleet.workers["decode-0"].submissions)
        second, third = await begin(client, lines(3)), await begin(client, lines(3))
        late = await asyncio.to_thread(store.batch, "default", third.id)
        late.expires_s = int(time.time()) + 1
        await asyncio.to_thread(store.save, late)
        await client.batches.cancel(second.id)
        assert (await ended(client, second, 5)).status == "cancelled"
        assert (await ended(client, third, 5)).status == "expired"
        await client.files.delete(second.input_file_id)
        assert (await client.batches.retrieve(first.id)).status == "in_progress"


async def test_lines_that_find_no_room_take_no_place_of_other_tenants(start):
    fleet = await start(at_once=2)
    worker = fleet.workers["decode-0"]
    serve = worker._run

    async def run(job):
        if job.submission.tenant == "one":
            worker._end(job.submission, ("unavailable", "no room for it", True))
        else:
            await serve(job)

    worker._run = run
    async with client_of(fleet) as client:
        mine = client.with_options(default_headers=ONE)
        stuck = await begin(mine, lines(6))
        await until(lambda: len(worker.submissions) >= 2)
        theirs = client.with_options(default_headers=TWO)
        done = await ended(theirs, await begin(theirs, lines(4)), 10)
        assert done.request_counts.completed == 4
        assert (await mine.batches.retrieve(stuck.id)).status == "in_progress"
        asked = sum(sent.tenant == "one" for sent in worker.submissions)
    assert asked < 40


async def test_a_line_whose_adapter_cannot_be_loaded_is_answered_with_that(start):
    fleet = await start(Script(fail=("adapter_load_failed", "it is damaged", False)))
    async with client_of(fleet) as client:
        done = await ended(client, await begin(client, lines(2)), 5)
        assert done.request_counts.failed == 2
        errors = await read(client, done.error_file_id)
    assert {error["response"]["body"]["error"]["code"] for error in errors} == {
        "adapter_load_failed"
    }


async def test_a_line_that_loses_its_worker_again_and_again_is_given_up(start, monkeypatch):
    """With one worker in the pool it was asked for a day, and ended its worker each time."""
    monkeypatch.setattr(runner, "_FIRST_PAUSE_S", 0.05)
    fleet = await start(Script(fail=("worker_lost", "its engine died", True)))
    async with client_of(fleet) as client:
        done = await ended(client, await begin(client, lines(1)), 10)
        (error,) = await read(client, done.error_file_id)
    assert error["response"]["body"]["error"]["code"] == "worker_lost"
    assert len(fleet.workers["decode-0"].submissions) <= 6


def deep_line(name: str, depth: int) -> bytes:
    nested = "[" * depth + "]" * depth
    whole = json.loads(line(name))
    whole["body"]["tools"] = "HERE"
    return json.dumps(whole).encode().replace(b'"HERE"', nested.encode())


async def test_a_line_of_deep_json_is_a_fault_of_that_line(start):
    """It ended the run, which began again twice a second until the batch expired."""
    content = b"\n".join([line("a"), deep_line("deep", 600), line("b")])
    fault = read_line(deep_line("deep", 600), 1, "/v1/chat/completions", set(), 10**6)
    assert isinstance(fault, LineFault)
    fleet = await start()
    async with client_of(fleet) as client:
        done = await ended(client, await begin(client, content), 10)
        assert done.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
        (error,) = await read(client, done.error_file_id)
    assert (error["custom_id"], error["error"]["code"]) == ("deep", "invalid_body")


async def test_a_fault_while_batches_are_looked_for_frees_no_lock(start, tmp_path, monkeypatch):
    """Another router took the lock, and asked the same lines into the same files."""
    whole, faults = BatchStore.open_batches, []

    def open_batches(store):
        found = whole(store)
        if found and not faults:
            faults.append(True)
            return found
        if len(faults) == 1:
            faults.append(True)
            raise PermissionError("for a moment")
        return found

    monkeypatch.setattr(BatchStore, "open_batches", open_batches)
    fleets = [await start(Script(step_s=0.001, prefill_s=0.1), at_once=1) for _ in range(2)]
    async with client_of(fleets[0]) as client:
        done = await ended(client, await begin(client, lines(20)))
        answers = await read(client, done.output_file_id)
    assert len(faults) == 2
    assert sorted(a["custom_id"] for a in answers) == sorted(f"line-{n}" for n in range(20))
    asked = [len(fleet.workers["decode-0"].submissions) for fleet in fleets]
    assert sorted(asked) == [0, 20]


def test_batches_that_have_ended_are_not_read_twice_a_second(tmp_path, monkeypatch):
    store = BatchStore(tmp_path, BatchConfig())
    record = BatchRecord(
        id="batch_" + "a" * 32,
        tenant="one",
        endpoint="/v1/chat/completions",
        input_file_id="file-" + "a" * 32,
        completion_window="24h",
        created_s=1,
        expires_s=2,
    )
    store.save(record)
    read_of = []
    whole = BatchStore.batches

    def batches(store, tenant):
        read_of.append(tenant)
        return whole(store, tenant)

    monkeypatch.setattr(BatchStore, "batches", batches)
    for _ in range(4):
        assert [batch.id for batch in store.open_batches()] == [record.id]
    record.cancel(3)
    record.finish(4)
    store.save(record)
    read_of.clear()
    for _ in range(10):
        assert store.open_batches() == []
    assert len(read_of) <= 2
    again = BatchRecord(**{**_fields(record), "id": "batch_" + "b" * 32})
    store.save(again)
    assert [batch.id for batch in store.open_batches()] == [again.id]


def _fields(record: BatchRecord) -> dict:
    names = ("tenant", "endpoint", "input_file_id", "completion_window", "created_s", "expires_s")
    return {name: getattr(record, name) for name in names}


async def test_a_tenants_slow_uploads_keep_no_other_tenant_out(start):
    """Four of them were all that the router took at a time."""
    fleet = await start()
    port = int(fleet.url.rpartition(":")[2])
    head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\nx-baton-tenant: one\r\ncontent-length: 9999\r\n"
    head += b"content-type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
    for _, writer in opened:
        writer.write(head)
    await asyncio.sleep(0.3)
    form = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}}
    sent = await fleet.http.post("/v1/files", **form, headers=TWO, timeout=5)
    assert sent.status_code == 200
    for _, writer in opened:
        writer.close()
    sent = await fleet.http.post("/v1/files", **form, headers=ONE, timeout=5)
    assert sent.status_code == 200


def test_of_two_deletions_of_a_file_one_finds_it(tmp_path, monkeypatch):
    """Both were answered with success."""
    store, other = (BatchStore(tmp_path, BatchConfig()) for _ in range(2))
    record = store.add_file("one", io.BytesIO(b"x"), "a", "batch", time.time(), 100)
    found = []
    monkeypatch.setattr(
        store, "batches", lambda tenant: found.append(other.delete_file(tenant, record.id)) or []
    )
    assert not store.delete_file("one", record.id)
    assert found == [True]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


async def test_a_tenant_with_the_name_of_the_lock_is_refused(start):
    """Its calls were faults of the router."""
    fleet = await start()
    header = {"x-baton-tenant": "lock"}
    form = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}}
    refused = await fleet.http.post("/v1/files", **form, headers=header)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "x-baton-tenant")


async def test_a_content_is_whole_or_missing_and_refused_ranges_are_json(start, monkeypatch):
    """A file that a tenant deleted while it was read was an error 500, or a cut response."""
    fleet = await start()
    sent = {"file": ("a", b"0123456789"), "purpose": (None, "batch")}
    path = f"/v1/files/{(await fleet.http.post('/v1/files', files=sent)).json()['id']}"
    for ranges in ("bytes=10-", "bytes=5-2", "lines=1-2", "bytes"):
        refused = await fleet.http.get(f"{path}/content", headers={"range": ranges})
        assert refused.status_code == 416 and refused.json()["error"]["param"] is None
    part = await fleet.http.get(f"{path}/content", headers={"range": "bytes=2-4"})
    assert (part.status_code, part.text) == (206, "234")
    whole = _Content.set_stat_headers

    def deleted(content, found):
        whole(content, found)
        next((fleet.router.settings.state_dir / Path("batch")).rglob("*.data")).unlink()

    monkeypatch.setattr(_Content, "set_stat_headers", deleted)
    assert (await fleet.http.get(f"{path}/content")).content == b"0123456789"
    assert (await fleet.http.get(f"{path}/content")).status_code == 404
