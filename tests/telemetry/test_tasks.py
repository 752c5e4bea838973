"""Background tasks: none dies unheard, none outlives its owner."""

import ast
import asyncio
import gc
import inspect
import logging

import pytest

from baton.telemetry import tasks as module
from baton.telemetry.tasks import BackgroundTasks
from tests.house.imports import ROOT, modules


async def broken() -> None:
    raise RuntimeError("by design")


@pytest.fixture
def failures() -> list[str]:
    return []


@pytest.fixture
def tasks(failures: list[str]) -> BackgroundTasks:
    return BackgroundTasks("test", failures.append)


async def test_what_raises_is_logged_with_its_trace_and_counted(tasks, failures, caplog) -> None:
    await tasks.spawn(broken(), "once")
    assert failures == ["once"]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert len(tasks) == 0


async def test_the_owner_of_a_vital_task_is_told(tasks, failures) -> None:
    told: list[Exception] = []
    await tasks.vital(broken(), "vital", told.append)
    assert failures == ["vital"]
    assert str(told[0]) == "by design"


async def test_a_kept_task_is_begun_again_until_it_returns(tasks, failures, monkeypatch) -> None:
    monkeypatch.setattr(module, "FIRST_DELAY_S", 0.001)
    runs = 0

    async def third_time_lucky() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            await broken()

    await tasks.keep(third_time_lucky, "kept")
    assert runs == 3
    assert failures == ["kept", "kept"]


async def test_the_pause_before_the_next_try_grows(tasks, failures, monkeypatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(delay_s: float) -> None:
        pauses.append(delay_s)
        if len(pauses) == 12:
            raise asyncio.CancelledError
        await sleep(0)

    monkeypatch.setattr(module.asyncio, "sleep", note)
    with pytest.raises(asyncio.CancelledError):
        await tasks.keep(broken, "kept")
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.8]
    assert pauses[-1] == module.MAX_DELAY_S


async def test_what_runs_beside_a_block_ends_with_it(tasks, failures) -> None:
    async with tasks.beside(asyncio.sleep(60), "beside") as task:
        await asyncio.sleep(0)
        assert not task.done()
    assert task.cancelled()
    assert failures == []


async def test_what_is_cancelled_before_it_began_is_closed(tasks) -> None:
    """Otherwise Python complains of a coroutine that was never awaited."""
    work = broken()
    async with tasks.beside(work, "beside"):
        pass
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED


async def test_close_ends_all_but_the_task_that_calls_it(tasks, failures) -> None:
    done = asyncio.Event()

    async def closer() -> None:
        await tasks.close()
        done.set()

    other = tasks.spawn(asyncio.sleep(60), "other")
    tasks.spawn(closer(), "closer")
    async with asyncio.timeout(5):
        await done.wait()
    assert other.cancelled()


async def test_a_task_that_did_not_hear_its_cancel_is_told_again(tasks, monkeypatch, caplog):
    """A library that swallows one must not keep a process from ending."""
    monkeypatch.setattr(module, "CANCEL_RETRY_S", 0.05)
    swallowed = 0

    async def deaf() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 2:
                    raise

    tasks.spawn(deaf(), "deaf")
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await tasks.close()
    assert swallowed == 2
    assert "task test: deaf ignored cancellation; cancelling again" in caplog.text


async def test_a_task_that_is_cancelled_before_it_ran_leaves_no_warning(tasks, recwarn) -> None:
    tasks.spawn(broken(), "never run")
    await tasks.close()
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []


def bare_tasks(code: str) -> list[int]:
    """Lines that begin a task nobody hears of; the block of a ``TaskGroup`` hears of its own."""
    nodes = list(ast.walk(ast.parse(code)))
    groups = {
        item.optional_vars.id
        for node in nodes
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if isinstance(item.optional_vars, ast.Name)
        and ast.unparse(item.context_expr) == "asyncio.TaskGroup()"
    }
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr in ("create_task", "ensure_future")
        and not (isinstance(node.value, ast.Name) and node.value.id in groups)
    ]


def test_a_bare_task_is_seen() -> None:
    assert bare_tasks("asyncio.create_task(f())\nloop.create_task(f())") == [1, 2]
    group = "async def f():\n  async with asyncio.TaskGroup() as {}:\n    group.create_task(g())"
    assert bare_tasks(group.format("group")) == []
    assert bare_tasks(group.format("another")) == [3]


def test_product_code_begins_tasks_in_no_other_way() -> None:
    bare = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules().values()
        if path != ROOT / "baton" / "telemetry" / "tasks.py"
        for line in bare_tasks(path.read_text(encoding="utf-8"))
    ]
    assert bare == []
