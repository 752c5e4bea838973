"""The audit log of several processes: one chain, whatever fails in between. Real Redis, files."""

import asyncio
import json
import multiprocessing
import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.tenants.audit import file as audit_file
from baton.tenants.audit.chain import Entry, verify
from baton.tenants.audit.inbox import AuditInbox
from baton.tenants.audit.log import AuditLog
from baton.tenants.audit.refused_logins import PER_MINUTE, RefusedLogins
from tests.router.conftest import until


def entries_of(path: Path) -> list[dict]:
    lines = path.read_bytes().splitlines()
    verdict = verify(lines)
    assert verdict.broken_line == 0, verdict
    return [json.loads(line) for line in lines]


def write(path: Path, name: str, count: int) -> None:
    for number in range(count):
        audit_file.append(path, [Entry(verb="scale", what=f"{name}-{number}", who=name)])


@pytest.mark.long
def test_appenders_in_threads_and_processes_make_one_chain(tmp_path):
    path = tmp_path / "audit.jsonl"
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=write, args=(path, f"p{n}", 30)) for n in range(2)]
    for other in others:
        other.start()
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda name: write(path, name, 30), ("a", "b", "c")))
    for other in others:
        other.join()
        assert other.exitcode == 0
    found = Counter(entry["who"] for entry in entries_of(path))
    assert found == dict.fromkeys(("p0", "p1", "a", "b", "c"), 30)
    assert path.stat().st_mode & 0o777 == 0o600


def forever(path: Path) -> None:
    while True:
        audit_file.append(path, [Entry(verb="v", what="x" * 3000, who="w")])


@pytest.mark.long
def test_killed_appenders_leave_an_unbroken_chain(tmp_path):
    path = tmp_path / "audit.jsonl"
    context = multiprocessing.get_context("spawn")
    for _ in range(3):
        process = context.Process(target=forever, args=(path,))
        process.start()
        before = audit_file.last(path).seq
        while audit_file.last(path).seq < before + 5:
            pass
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    count = len(entries_of(path))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"seq":')  # as a kill in the middle of a write leaves it
    write(path, "after", 1)
    assert path.read_bytes().startswith(whole) and len(entries_of(path)) == count + 1


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "audit.jsonl"
    write(path, "a", 2)
    before = path.read_bytes()
    real = os.write

    def full(file, data):
        real(file, bytes(data[:10]))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(audit_file.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        write(path, "b", 1)
    assert path.read_bytes() == before


@pytest.fixture
async def logs(registry, tmp_path):
    made: list[AuditLog] = []

    def start(file: str | None = "audit.jsonl", **more) -> AuditLog:
        path = tmp_path / file if file else None
        made.append(AuditLog(AuditInbox(registry), path, **more))
        made[-1].start()
        return made[-1]

    yield start
    for log in made:
        await log.close()


async def test_two_routers_and_a_controller_write_one_chain(logs, tmp_path, registry):
    routers = [logs(), logs()]
    controller = logs(None)
    await asyncio.gather(
        *(
            log.write(Entry(verb="scale", what=f"{name}-{number}", who=name))
            for number in range(20)
            for name, log in zip(("one", "two", "controller"), [*routers, controller], strict=True)
        )
    )
    path = tmp_path / "audit.jsonl"
    await until(lambda: len(path.read_bytes().splitlines()) >= 60, 5.0)
    await asyncio.sleep(0.7)
    found = entries_of(path)
    assert Counter(entry["who"] for entry in found) == dict.fromkeys(
        ("one", "two", "controller"), 20
    )
    assert await AuditInbox(registry).waiting() == []
    assert await AuditInbox(registry).head() == audit_file.last(path)


async def test_an_entry_that_arrives_twice_is_written_once(logs, tmp_path, registry):
    inbox = AuditInbox(registry)
    entry = Entry(verb="drain", what="worker-0", who="w")
    path = tmp_path / "audit.jsonl"
    audit_file.append(path, [entry])  # by a router that died before it removed it from Redis
    await inbox.put(entry)
    await registry.send(("RPUSH", registry.key("audit", "inbox"), b"no entry"))
    logs()
    while await inbox.waiting():
        await asyncio.sleep(0.05)
    assert [one["id"] for one in entries_of(path)] == [entry.id]


async def test_redis_that_is_away_or_emptied_loses_nothing_of_the_file(
    logs, tmp_path, registry, redis_server
):
    failures: list[str] = []
    router = logs()
    controller = logs(None)
    controller.on_failure = lambda: failures.append("controller")
    router.on_failure = lambda: failures.append("router")
    await router.write(Entry(verb="up", who="w"))
    os.kill(redis_server.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(0.2):
            await controller.write_soon(Entry(verb="keys revoke", who="w"))
        await controller.write(Entry(verb="turn", what="worker-1", who="planner"))
        await router.write_soon(Entry(verb="keys create", who="w"))
    finally:
        os.kill(redis_server.pid, signal.SIGCONT)
    assert "router" not in failures, "the router has the file"
    assert "controller" in failures
    path = tmp_path / "audit.jsonl"
    await until(lambda: len(entries_of(path)) == 4, 8.0)
    found = [entry["verb"] for entry in entries_of(path)]
    assert sorted(found) == ["keys create", "keys revoke", "turn", "up"]
    assert found[:2] == ["up", "keys create"]
    await registry.send(("FLUSHALL",))
    head = audit_file.last(path)
    for _ in range(40):
        if await AuditInbox(registry).head() == head:
            break
        await asyncio.sleep(0.1)
    assert await AuditInbox(registry).head() == head


async def test_a_file_that_cannot_be_written_is_told_and_the_entry_waits_in_redis(
    logs, tmp_path, registry, caplog
):
    failures: list[int] = []
    log = logs("missing/audit.jsonl")
    log.on_failure = lambda: failures.append(1)
    await log.write(Entry(verb="scale", who="w"))
    assert failures and "audit entry is in Redis only verb=scale" in caplog.text
    assert len(await AuditInbox(registry).waiting()) == 1
    (tmp_path / "missing").mkdir()
    await until(lambda: (tmp_path / "missing" / "audit.jsonl").exists(), 3.0)
    assert [entry["verb"] for entry in entries_of(tmp_path / "missing" / "audit.jsonl")] == [
        "scale"
    ]


async def test_a_shorter_file_does_not_replace_the_recorded_head(registry, tmp_path):
    inbox = AuditInbox(registry)
    path = tmp_path / "audit.jsonl"
    write(path, "w", 3)
    head = audit_file.last(path)
    await inbox.note(head)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    await inbox.note(audit_file.last(path))
    verdict = verify(path.read_bytes().splitlines(), await inbox.head())
    assert (verdict.broken_line, verdict.problem) == (3, "3 lines were recorded: the end was cut")


async def test_written_lines_are_exported_once(logs, tmp_path):
    exported: list[bytes] = []
    one, two = logs(export=exported.append), logs(export=exported.append)
    remote = logs(None, export=exported.append)
    for log in (one, two, remote):
        await log.write(Entry(verb="scale", who="w"))
    await until(lambda: len(exported) == 3, 3.0)
    assert sorted(exported) == sorted((tmp_path / "audit.jsonl").read_bytes().splitlines(True))


@given(st.lists(st.integers(0, 20_000_000_000), max_size=200))
def test_refused_logins_are_bounded_per_minute_and_all_are_counted(gaps):
    logins = RefusedLogins()
    now_ns = 0
    entries = []
    times: list[int] = []
    for gap in gaps:
        now_ns += gap
        logins.note("10.0.0.1", "GET /metrics", "why", now_ns)
        taken = logins.take(now_ns)
        times += [now_ns] * sum(entry.what != "" for entry in taken)
        entries += taken
    entries += logins.take(now_ns + 60_000_000_000)
    left_out = sum(entry.after["left_out"] for entry in entries if not entry.what)
    named = [entry for entry in entries if entry.what]
    assert len(named) + left_out == len(gaps)
    for begin in times:
        within = sum(begin <= at < begin + 60_000_000_000 for at in times)
        assert within <= 2 * PER_MINUTE
