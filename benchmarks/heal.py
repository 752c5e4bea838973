"""Redis is lost and comes back empty: how long until a router's index is whole again.

    python -m benchmarks.heal --blocks 10000000 --workers 1000

A real Redis, as many processes of publishers as said (each with its part of the workers: their
records, their leases in the registry, their KV events), and here a router's index with the feed
that it really has. Redis is killed and started again, empty, at the same port.

It is healed when every worker's blocks have been read anew. No lease is lost when no worker leaves
the list meanwhile, and no incarnation the index.
"""

import asyncio
import contextlib
import os
import resource
import secrets
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from baton.registry.event_feed import EventFeed
from baton.registry.kv_events import KvEventPublisher
from baton.registry.redis_store import Registry
from baton.registry.types import WorkerRecord
from baton.registry.workers import Presence, RegistryWatcher
from baton.telemetry.metrics import Metrics
from baton.telemetry.tasks import BackgroundTasks
from benchmarks.router.processes import cpu_s, free_port, redis, running
from router.routing.placement.index_feed import IndexFeeder
from router.routing.placement.prefix_index import PrefixIndex

_FLEET = "heal"
_LIMIT_S = 600.0
_LOOK_S = 0.002
_LOOKS_OF_BLOCKS = 25  # the blocks of all workers are counted once in so many looks


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen.

    Attributes:
        healed_s: From the start of the empty Redis.
        router_cpu_s: Of it, CPU time of the router.
        publishers_cpu_s: And of all workers together.
        longest_s: CPU time between two looks of a task, while it healed: the loop was held so long.
        left: Workers that left the list.
        least_blocks: In the index, at any time.
    """

    blocks: int
    workers: int
    filled_s: float
    healed_s: float
    router_cpu_s: float
    publishers_cpu_s: float
    longest_s: float
    left: int
    least_blocks: int
    router_bytes: int


async def _publish(url: str, first: int, workers: int, blocks: int) -> None:
    """So many workers in one process, until it is killed."""
    kept = []
    for number in range(first, first + workers):
        incarnation, registry = secrets.token_bytes(16), Registry(url, _FLEET)
        publisher = KvEventPublisher(registry, incarnation)
        packed = os.urandom(16 * blocks)
        publisher.publish(stored=[packed[16 * i : 16 * i + 16] for i in range(blocks)])
        record = WorkerRecord(
            worker_id=f"decode-{number}",
            role="decode",
            state="ready",
            epoch=1,
            incarnation=incarnation,
        )
        presence = Presence(registry, record)
        kept.append((publisher, presence))
    for publisher, presence in kept:
        presence.start()
        publisher.start()
    await asyncio.Event().wait()


class _Router:
    """A router's index, its list of workers, and what is seen of both."""

    def __init__(self, url: str) -> None:
        self._registry = Registry(url, _FLEET)
        self.index = PrefixIndex()
        self.watcher = RegistryWatcher(self._registry)
        self._feeder = IndexFeeder(self.index, EventFeed(self._registry), Metrics("router"))
        self._tasks = BackgroundTasks("heal")
        self.left = 0
        self.longest_s = 0.0
        self.least_blocks = 0
        self._looks = 0

    def start(self) -> None:
        self._feeder.start()
        self._tasks.keep(self._follow, "workers")
        self._tasks.keep(self._look, "look")

    async def _follow(self) -> None:
        async for change in self.watcher:
            self.left += change.after is None

    async def _look(self) -> None:
        """How long the loop is held: CPU time between two looks, other programs do not count."""
        while True:
            began_s = time.thread_time()
            await asyncio.sleep(_LOOK_S)
            self.longest_s = max(self.longest_s, time.thread_time() - began_s)
            self._looks += 1
            if self._looks % _LOOKS_OF_BLOCKS == 0:
                self.least_blocks = min(self.least_blocks, self.index.total_hashes)

    async def until_read(self, snapshots: int, blocks: int) -> float:
        """Wait until so many snapshots were read in all; how long that took."""
        began_s = time.monotonic()
        while self.index.snapshots < snapshots or self.index.total_hashes < blocks:
            if time.monotonic() - began_s > _LIMIT_S:
                raise TimeoutError(f"{self.index.snapshots} of {snapshots} snapshots were read")
            await asyncio.sleep(0.05)
        return time.monotonic() - began_s

    async def close(self) -> None:
        await self._tasks.close()
        await self._feeder.close()
        await self._registry.close()


async def measure(workers: int, blocks: int, processes: int) -> Figures:
    """Fill, lose Redis, heal."""
    port, per_worker = free_port(), blocks // workers
    with contextlib.ExitStack() as publishers:
        pids: list[int] = []
        first_life = redis(port)
        url = first_life.__enter__()
        for part in range(processes):
            count = workers // processes
            command = [sys.executable, "-m", "benchmarks.heal", "--publish", url]
            command += ["--first", str(part * count), "--workers", str(count)]
            command += ["--blocks", str(per_worker * count)]
            pids.append(publishers.enter_context(running(command)).pid)
        router = _Router(url)
        router.start()
        filled_s = await router.until_read(workers, per_worker * workers)
        await asyncio.sleep(3.0)
        first_life.__exit__(None, None, None)
        await asyncio.sleep(2.0)
        router.longest_s, router.left = 0.0, 0
        router.least_blocks = router.index.total_hashes
        before = router.index.snapshots
        spent_s = [-time.process_time(), -sum(map(cpu_s, pids))]
        with redis(port):
            healed_s = await router.until_read(before + workers, per_worker * workers)
            spent_s = [spent_s[0] + time.process_time(), spent_s[1] + sum(map(cpu_s, pids))]
            await asyncio.sleep(3.0)
        figures = Figures(
            blocks=per_worker * workers,
            workers=workers,
            filled_s=filled_s,
            healed_s=healed_s,
            router_cpu_s=spent_s[0],
            publishers_cpu_s=spent_s[1],
            longest_s=router.longest_s,
            left=router.left,
            least_blocks=router.least_blocks,
            router_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
        await router.close()
        return figures


def main(
    blocks: Annotated[int, typer.Option(help="In all.")] = 10_000_000,
    workers: Annotated[int, typer.Option(help="That hold them.")] = 1000,
    processes: Annotated[int, typer.Option(help="Of publishers.")] = 2,
    publish: Annotated[str, typer.Option(hidden=True)] = "",
    first: Annotated[int, typer.Option(hidden=True)] = 0,
    json: Annotated[Path | None, typer.Option(help="Write figures here.")] = None,
) -> None:
    """Measure once, and print what was seen."""
    if publish:
        asyncio.run(_publish(publish, first, workers, blocks // workers))
        return
    figures = asyncio.run(measure(workers, blocks, processes))
    for name, value in msgspec.structs.asdict(figures).items():
        typer.echo(
            f"{name:>13} {value:,.3f}" if isinstance(value, float) else f"{name:>13} {value:,}"
        )
    if json is not None:
        json.write_bytes(msgspec.json.encode(figures))


if __name__ == "__main__":
    typer.run(main)
