"""KV below the pool, with real processes: it comes back for prompts here and for peers."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from baton.engine.settings import KvTierSettings
from tests.workers.harness import MiniRouter, WorkerProcess, routed, workers
from tests.workers.test_prefix_pull import BLOCK_TOKENS, BLOCKS, ask, outcomes, page_of

TIERS = KvTierSettings(memory_mb=1)


async def fill(router: MiniRouter, name: str) -> None:
    """Prompts, one after the other, that need more blocks than the pool has."""
    for number in range(5):
        await router.submit(f"{name}-{number}", [number + 5] * 200)
        assert not (await router.ended(f"{name}-{number}")).HasField("error")


async def test_what_was_evicted_is_brought_back_for_prompts_and_for_peers():
    async with workers("decode-0", "decode-1", kv_blocks=40, kv_tiers=TIERS) as (a, b):
        async with routed(a) as router:
            golden = await ask(router, "golden")
            await fill(router, "first")
            assert await ask(router, "again") == golden
            assert router.routes["again"].cached_tokens == BLOCKS * BLOCK_TOKENS
            page = await page_of(a)
            assert 'baton_prefix_tokens_total{source="memory"}' in page
            assert 'baton_kv_tier_moved_bytes_total{direction="brought",tier="memory"}' in page
            await fill(router, "second")
            await router.baseline()
            (tier,) = router.status.kv_tiers
            assert tier.held_blocks > BLOCKS and tier.block_s > 0
        async with routed(b) as router:
            assert await ask(router, "pulled", prefix=(a, BLOCKS)) == golden
            assert await outcomes(b) == {"pulled": 1}
            await router.baseline()
        async with routed(a) as router:
            await router.baseline()


def files(folder: Path, worker: str) -> list[Path]:
    return sorted(folder.glob(f"{worker}/*/*.kv"))


@contextlib.asynccontextmanager
async def sharing(folder: Path, *names: str) -> AsyncIterator[list[WorkerProcess]]:
    """Workers whose disk tiers share a folder."""
    tiers = {
        name: KvTierSettings(disk_mb=1, disk_folder=str(folder / name), disk_shared=True)
        for name in names
    }
    started = [
        await WorkerProcess.start(name, kv_blocks=40, kv_tiers=own) for name, own in tiers.items()
    ]
    try:
        yield started
    finally:
        await asyncio.gather(*(worker.stop() for worker in started))


async def stored(router: MiniRouter) -> list[int]:
    """Let the worker store the prompt's blocks; return its response."""
    golden = await ask(router, "golden")
    await fill(router, "first")
    await router.baseline()
    return golden


async def knows(worker: WorkerProcess, blocks: int) -> None:
    """Wait until a worker has found at least so many blocks of others."""
    line = re.compile(r'baton_kv_tier_blocks{state="elsewhere",tier="disk"} (\S+)')
    async with asyncio.timeout(20):
        while not ((found := line.search(await page_of(worker))) and float(found[1]) >= blocks):
            await asyncio.sleep(0.1)


async def failures(worker: WorkerProcess, reason: str) -> float:
    line = f'baton_kv_tier_failures_total{{reason="{reason}",tier="disk"}} '
    page = await page_of(worker)
    return sum(float(row.removeprefix(line)) for row in page.splitlines() if row.startswith(line))


async def test_what_a_killed_worker_has_stored_is_read_by_another_that_never_computed_it(
    tmp_path: Path,
) -> None:
    async with sharing(tmp_path, "decode-0", "decode-1") as (a, b):
        async with routed(a) as router:
            golden = await stored(router)
            # It is killed while it writes more.
            for number in range(6):
                await router.submit(f"late-{number}", [number + 50] * 200)
            await router.until(lambda: "late-2" in router.ends)
            for pid in (a.record.pid, a.process.pid):
                os.kill(pid, signal.SIGKILL)
        there = files(tmp_path, "decode-0")
        assert len(there) > BLOCKS
        await knows(b, len(there))
        async with routed(b) as router:
            assert await ask(router, "read") == golden
            assert router.routes["read"].cached_tokens == BLOCKS * BLOCK_TOKENS
            page = await page_of(b)
            assert f'baton_prefix_tokens_total{{source="disk"}} {BLOCKS * BLOCK_TOKENS}.0' in page
            await router.baseline()
        assert await failures(b, "damaged") == 0


async def test_damaged_files_of_another_worker_are_computed_and_counted(tmp_path: Path) -> None:
    async with sharing(tmp_path, "decode-0", "decode-1") as (a, b):
        async with routed(a) as router:
            golden = await stored(router)
        there = files(tmp_path, "decode-0")
        await knows(b, len(there))
        for path in there:
            raw = path.read_bytes()
            path.write_bytes(raw[:100] + bytes([raw[100] ^ 1]) + raw[101:])
        async with routed(b) as router:
            assert await ask(router, "computed") == golden
            assert router.routes["computed"].cached_tokens == 0
            await router.baseline()
        assert await failures(b, "damaged") == BLOCKS


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that has room for some blocks."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


async def test_a_disk_that_is_full_for_both_workers_costs_blocks_and_nothing_else(
    small_disk: Path,
) -> None:
    async with sharing(small_disk, "decode-0", "decode-1") as (a, b):
        async with routed(a) as router:
            golden = await stored(router)
            await fill(router, "second")
            assert await failures(a, "failed") > 0
            await router.baseline()
        there = files(small_disk, "decode-0")
        assert there
        await knows(b, len(there))
        async with routed(b) as router:
            assert await ask(router, "read") == golden
            assert router.routes["read"].cached_tokens > 0
            await fill(router, "third")
            await router.baseline()
    whole = files(small_disk, "decode-0") + files(small_disk, "decode-1")
    assert len({len(path.read_bytes()) for path in whole}) == 1, "no half file has such a name"
