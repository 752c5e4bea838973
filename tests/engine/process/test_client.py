"""The shell's handle on a step-loop process."""

import asyncio
import mmap
import os
import subprocess
import threading
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock, call

import msgspec
import psutil
import pytest

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.process import client as module
from baton.engine.process import messages
from baton.engine.process.client import EngineClient, ReportInbox
from baton.engine.process.handle import EngineHandle
from baton.engine.settings import EmulatedModel, EngineSettings
from baton.telemetry.alive_clock import ALIVE, Standstills
from baton.types import events as ev
from baton.types.errors import InternalError
from baton.types.geometry import KvGeometry
from baton.types.params import SamplingParams
from baton.wire.tokens import pack_tokens


async def test_an_engine_that_loads_long_is_waited_for_as_long_as_it_says_something() -> None:
    inbox = ReportInbox()
    waiting = asyncio.create_task(inbox.until_ready(1.0))
    for _ in range(6):
        await asyncio.sleep(0.25)
        inbox.feed(messages.frame([messages.LoadProgress("convert weights: 10 %")]))
    assert not waiting.done()
    with pytest.raises(InternalError, match="no report from the loading engine"):
        await asyncio.wait_for(waiting, 10.0)


async def test_a_standstill_of_this_process_is_not_waited_for() -> None:
    """The reports of that time are read after it."""
    clock = asyncio.create_task(ALIVE.run())
    waiting = asyncio.create_task(ReportInbox().until_ready(1.0))
    await asyncio.sleep(0.05)
    time.sleep(2.0)  # noqa: ASYNC251 - the loop stands still
    await asyncio.sleep(0.05)
    assert not waiting.done()
    for task in (clock, waiting):
        task.cancel()
    await asyncio.wait([clock, waiting])


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children()}


async def test_whoever_gives_up_on_an_engine_that_loads_leaves_no_process_behind() -> None:
    before = children()
    starting = asyncio.create_task(EngineClient.start(EngineSettings(model="emulated")))
    while not children() - before:
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert children() == before


async def test_who_gets_a_pool_cannot_map_it_for_writing_nor_change_its_size() -> None:
    """Its mode would let our user open it again for writing: the seal is on the file itself."""
    client = await EngineClient.start(EngineSettings(model="emulated", kv_blocks=8))
    try:
        client.pools[0][:4] = b"mine"  # who had it mapped before writes on
        again = os.open(f"/proc/self/fd/{client.pool_fd}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(again, 4096)
            with pytest.raises(PermissionError):
                os.pwrite(again, b"other", 0)
            with pytest.raises(PermissionError):
                os.ftruncate(again, 0)
        finally:
            os.close(again)
        with mmap.mmap(client.pool_fd, 4096, prot=mmap.PROT_READ) as seen:
            assert seen[:4] == b"mine"
    finally:
        await client.stop()


async def test_an_engine_that_cannot_load_says_why() -> None:
    with pytest.raises(InternalError):
        await EngineClient.start(EngineSettings(model="/nowhere"), stderr=subprocess.DEVNULL)


async def test_what_an_engine_said_last_is_heard_before_its_end(monkeypatch) -> None:
    """Suspicion e: a process may be reaped before its last bytes are read."""
    reader = asyncio.StreamReader()
    process = SimpleNamespace(pid=1, returncode=1, wait=AsyncMock(return_value=1))

    async def spawn(*_: object) -> tuple[object, object]:
        return process, Mock()

    async def connect(**_: object) -> tuple[object, object]:
        return reader, Mock()

    def feed_last() -> None:
        reader.feed_data(messages.frame([messages.Fatal("out of memory")]))
        reader.feed_eof()

    monkeypatch.setattr(module, "_spawn", spawn)
    monkeypatch.setattr(module.asyncio, "open_connection", connect)
    asyncio.get_running_loop().call_later(0.05, feed_last)
    with pytest.raises(InternalError, match="out of memory"):
        await EngineClient.start(EngineSettings(model="emulated"), timeout_s=5)


def handle_of(client: object) -> EngineHandle:
    geometry = KvGeometry(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=8, dtype="bf16")
    client.ready = SimpleNamespace(geometry=geometry)
    return EngineHandle(client)


def submitted(request_id: str) -> messages.Submit:
    spec = RequestSpec(kind=Kind.FULL, params=SamplingParams(max_tokens=1), hash_seed=bytes(16))
    return messages.Submit(request_id=request_id, prompt_token_ids=b"", spec=spec)


def test_a_fault_in_one_requests_handler_ends_that_request_alone() -> None:
    """It ended the engine, and with it all others' requests."""
    client = Mock()
    handle = handle_of(client)
    heard: dict[str, list[object]] = {"faulty": [], "other": []}

    def faulty(report: object) -> None:
        heard["faulty"].append(report)
        if not isinstance(report, ev.Ended):
            raise RuntimeError("a surprise")

    handle.submit(submitted("faulty"), faulty)
    handle.submit(submitted("other"), heard["other"].append)
    for name in heard:
        handle._on_report(ev.Admitted(request_id=name, cached_tokens=0, queue_ns=0))
        handle._on_report(ev.Ended(name, "cancelled" * (name == "faulty")))
    admitted, end = heard["faulty"]
    assert (admitted.request_id, end.error_code) == ("faulty", "internal_error")
    assert [type(report) for report in heard["other"]] == [ev.Admitted, ev.Ended]
    assert client.send.call_args == call(messages.Cancel("faulty"))
    assert not handle.has_work


def test_a_report_is_old_while_the_engine_has_not_read_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that comes within a step is not in the load that the step ends with."""
    now_ns = 1_000
    monkeypatch.setattr("baton.engine.process.handle.time.monotonic_ns", lambda: now_ns)
    handle = handle_of(Mock())
    now_ns = 2_000
    handle.submit(submitted("r"), Mock())
    handle._on_report(ev.StepDone(step=1, duration_ns=500))  # it began at 1,500
    now_ns = 2_300
    assert handle.load_age_ns(now_ns) == 800
    handle._on_report(ev.StepDone(step=2, duration_ns=200))  # it began at 2,100, and ended the work
    assert handle.load_age_ns(now_ns) == 0


def test_a_step_loop_that_says_nothing_is_silent_until_it_speaks() -> None:
    """Defect 23."""
    handle = handle_of(Mock())
    began_ns = handle._report_ns
    ticks = [began_ns + number * 250_000_000 for number in range(20)]
    silent = []
    for now_ns in ticks:
        handle.watch(now_ns)
        silent.append(handle.silent)
    assert silent.index(True) == 13, "just after 3 s"
    handle._on_report(messages.Alive())
    assert not handle.silent


def test_an_engine_with_long_steps_is_given_longer() -> None:
    """A step of a long prompt takes seconds on a busy CPU: that is no reason to move requests."""
    handle = handle_of(Mock())
    handle._on_report(ev.StepDone(step=1, duration_ns=2_500_000_000))
    for step in range(2, 40):
        handle._on_report(ev.StepDone(step=step, duration_ns=10_000_000))
    heard_ns = handle._report_ns
    handle.watch(heard_ns + 10_000_000_000)
    assert not handle.silent
    handle.watch(heard_ns + 11_000_000_000)
    assert handle.silent
    handle._on_report(messages.Alive())
    for step in range(40, 110):
        handle._on_report(ev.StepDone(step=step, duration_ns=10_000_000))
    handle.watch(handle._report_ns + 3_100_000_000)
    assert handle.silent, "long steps of some time ago do not count"


def test_a_server_that_answers_slowly_but_in_time_does_not_count_as_hung() -> None:
    handle = EngineHandle(handle_of(Mock()).client, is_server=True)
    handle.watch(handle._report_ns + 8_600_000_000)  # 0.5 s between two questions, 8 s for one
    assert not handle.silent
    handle.watch(handle._report_ns + 10_100_000_000)
    assert handle.silent


def test_a_shell_that_stood_still_itself_does_not_blame_its_engine() -> None:
    """Defect 23: reports of that time are still to be read."""
    handle = handle_of(Mock())
    standstills = Standstills()
    standstills.tick(handle._report_ns)
    back_ns = handle._report_ns + 10_000_000_000
    handle.watch(standstills.alive_ns(back_ns))
    standstills.tick(back_ns)
    handle.watch(standstills.alive_ns(back_ns + 250_000_000))
    assert not handle.silent
    for number in range(40):
        standstills.tick(back_ns + number * 100_000_000)
    handle.watch(standstills.alive_ns(back_ns + 4_000_000_000))
    assert handle.silent


EMULATED = EngineSettings(
    model="smollm2",
    kv_blocks=64,
    emulated=EmulatedModel(
        timing="epyc-135m", vocab_size=49152, eos_token_ids=(2,), max_context_tokens=8192
    ),
)


async def test_an_emulated_engine_of_a_fleet_is_a_thread_that_answers_and_ends() -> None:
    before, threads = children(), threading.active_count()
    handle = EngineHandle(await EngineClient.start(EMULATED))
    assert handle.client.pid == os.getpid()
    assert handle.client.ready.numerics_id == "emulated/epyc-135m"
    assert handle.client.ready.max_context_tokens == 8192
    tokens, ended = [], asyncio.get_running_loop().create_future()

    def hear(report: object) -> None:
        if isinstance(report, ev.Tokens):
            tokens.extend(report.tokens)
        elif isinstance(report, ev.Ended):
            ended.set_result(report)

    params = SamplingParams(max_tokens=5, ignore_eos=True)
    spec = RequestSpec(kind=Kind.FULL, params=params, hash_seed=bytes(16))
    prompt = pack_tokens(range(300, 340))
    handle.submit(messages.Submit(request_id="a", prompt_token_ids=prompt, spec=spec), hear)
    await asyncio.wait_for(ended, 10)
    assert len(tokens) == 5
    assert children() == before
    assert threading.active_count() == threads + 1
    assert await handle.client.stop() == 0
    async with asyncio.timeout(10):  # the thread reports its end shortly before it ends
        while threading.active_count() > threads:
            await asyncio.sleep(0.01)


async def test_a_request_that_arrives_during_a_step_waits_in_the_queue() -> None:
    settings = msgspec.structs.replace(EMULATED, max_step_tokens=4096, kv_blocks=512)
    handle = EngineHandle(await EngineClient.start(settings))
    ends: asyncio.Queue[ev.Ended] = asyncio.Queue()

    def hear(report: object) -> None:
        if isinstance(report, ev.Ended):
            ends.put_nowait(report)

    spec = RequestSpec(kind=Kind.FULL, params=SamplingParams(max_tokens=1), hash_seed=bytes(16))
    try:
        for name, tokens in (("long", 4000), ("short", 20)):
            prompt = pack_tokens(range(300, 300 + tokens))
            command = messages.Submit(request_id=name, prompt_token_ids=prompt, spec=spec)
            handle.submit(command, hear)
            await asyncio.sleep(0.1)  # the long prompt is in a step of more than a second
        ended = {one.request_id: one for one in [await ends.get(), await ends.get()]}
    finally:
        await handle.client.stop()
    assert ended["long"].queue_ns < 5e8 < ended["short"].queue_ns, ended


async def test_an_emulated_engine_that_hangs_in_a_step_is_left_when_it_wakes() -> None:
    client = await EngineClient.start(EMULATED)
    slow = pack_tokens([7] * 500)
    params = SamplingParams(max_tokens=5)
    spec = RequestSpec(kind=Kind.FULL, params=params, hash_seed=bytes(16))
    client.send(messages.Submit(request_id="a", prompt_token_ids=slow, spec=spec))
    await asyncio.sleep(0.05)  # in the step, which lasts 170 ms
    assert await client.stop(grace_s=0.0) == 0
    assert await client.exited == 0


async def test_an_emulated_engine_that_cannot_start_says_why() -> None:
    unknown = msgspec.structs.replace(EMULATED.emulated, timing="tpu-9")
    with pytest.raises(InternalError, match="tpu-9"):
        await EngineClient.start(msgspec.structs.replace(EMULATED, emulated=unknown))


@pytest.mark.parametrize("local", [False, True])
async def test_a_first_token_outside_the_vocabulary_ends_its_request_alone(local: bool) -> None:
    """It comes from another worker, and ended the engine."""
    client = await EngineClient.start(EngineSettings(model="emulated", kv_blocks=8))
    try:
        reports: asyncio.Queue[messages.Report] = asyncio.Queue()
        client.listen(reports.put_nowait)

        async def of(kind: type[messages.Report]) -> messages.Report:
            async with asyncio.timeout(10):
                while not isinstance(report := await reports.get(), kind):
                    pass
            return report

        spec = RequestSpec(kind=Kind.REMOTE, params=SamplingParams(max_tokens=4), hash_seed=b"s")
        submit = messages.Submit(request_id="r", prompt_token_ids=pack_tokens([3] * 9), spec=spec)
        client.send(submit)
        generation = (await of(ev.Reserved)).generation
        client.send(messages.Bind("r", generation))
        await of(ev.Bound)
        if local:
            client.send(messages.ComputeLocally("r", (2**31,)))
        else:
            client.send(messages.Commit("r", generation, (2**31,)))
        assert (await of(ev.Ended)).error_code == "invalid_request"
        client.send(messages.PagesDrained("r", generation))
        client.send(
            msgspec.structs.replace(submit, spec=msgspec.structs.replace(spec, kind=Kind.FULL))
        )
        assert (await of(ev.Ended)).error_code == ""
    finally:
        await client.stop()
