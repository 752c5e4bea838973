"""Engines that start before their workers: who takes one has it as if it had started it."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from baton.engine.process.client import EngineClient
from baton.engine.process.own_process import SOCKET_VARIABLE, EarlyEngine
from baton.engine.settings import EngineSettings

SETTINGS = EngineSettings(model="emulated", kv_blocks=8, threads=1)

WORKER = """
import asyncio, sys
import msgspec
from baton.engine.process.client import EngineClient
from baton.engine.settings import EngineSettings

async def main():
    settings = msgspec.json.decode(sys.argv[1], type=EngineSettings)
    client = await EngineClient.start(settings)
    print(client.pid, flush=True)
    await client.exited

asyncio.run(main())
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[psutil.Process]:
    """The parent process of two engines."""
    path = tmp_path / "engines"
    monkeypatch.setenv(SOCKET_VARIABLE, str(path))
    early = [EarlyEngine(SETTINGS, str(tmp_path / f"{number}.log")) for number in range(2)]
    program = [sys.executable, "-m", "baton.engine.process.early_engines", str(path)]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(early))
        process.stdin.close()
        while not path.exists():
            assert process.poll() is None
        yield psutil.Process(process.pid)
        process.kill()


async def gone(pid: int) -> None:
    async with asyncio.timeout(20.0):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.02)


async def test_workers_take_the_engines_with_their_settings(parent: psutil.Process) -> None:
    other = await EngineClient.start(msgspec.structs.replace(SETTINGS, kv_blocks=9))
    first, second = [await EngineClient.start(SETTINGS) for _ in range(2)]
    third = await EngineClient.start(SETTINGS)
    engines = {child.pid for child in parent.children()}
    assert {first.pid, second.pid} == engines
    assert {psutil.Process(each.pid).ppid() for each in (other, third)} == {os.getpid()}
    assert first.ready.pid == first.pid
    assert len(first.pools[0]) == first.pool_geometry.pool_bytes
    os.kill(second.pid, signal.SIGKILL)
    assert await second.exited == -signal.SIGKILL
    assert await first.stop() == 0
    for client in (second, other, third):
        await client.stop()
    assert await asyncio.to_thread(parent.wait, 20.0) == 0  # its last engine has ended


async def test_an_engine_ends_with_its_worker_even_if_it_stands_still(
    parent: psutil.Process,
) -> None:
    text = msgspec.json.encode(SETTINGS).decode()
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WORKER, text, stdout=subprocess.PIPE
    )
    assert worker.stdout is not None
    pid = int(await worker.stdout.readline())
    assert pid in {child.pid for child in parent.children()}
    os.kill(pid, signal.SIGSTOP)
    worker.kill()
    await worker.wait()
    await gone(pid)


async def test_an_engine_ends_with_the_fleet(parent: psutil.Process) -> None:
    client = await EngineClient.start(SETTINGS)
    os.kill(client.pid, signal.SIGSTOP)
    parent.kill()
    assert await client.exited == -signal.SIGKILL
    await gone(client.pid)
    await client.stop()
