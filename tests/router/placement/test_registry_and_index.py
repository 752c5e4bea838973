"""With a real Redis: workers appear, their blocks steer requests, and Redis may go away."""

import asyncio
import contextlib
import time
from types import SimpleNamespace

import msgspec
import pytest
from batonpb.common_pb2 import Capabilities

from baton.registry.kv_events import KvEventPublisher
from baton.registry.redis_store import Registry
from baton.registry.workers import Presence, RegistryWatcher
from baton.types.block_hashes import block_hashes
from fleet.local.redis_server import EmbeddedRedis
from router.frontend.api.bodies.completion import CompletionBody
from router.frontend.api.bodies.parse import parse
from router.frontend.api.caller import read_headers
from router.frontend.api.prepare import Preparer
from router.process import Process
from router.sources import LaneTables
from tests.router.conftest import MODEL, process_of, record_of, until
from tests.router.emulated_worker import EmulatedWorker, Script

PROMPT = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture
def redis_server():
    server = EmbeddedRedis()
    server.start()
    yield server
    server.stop()


@contextlib.asynccontextmanager
async def announced(registry: Registry, worker: EmulatedWorker):
    """A worker's presence and its events in the registry."""
    record = msgspec.structs.replace(
        record_of(worker.worker_id, worker.address, worker.role), incarnation=worker.incarnation
    )
    presence, publisher = Presence(registry, record), KvEventPublisher(registry, record.incarnation)
    presence.start()
    publisher.start()
    try:
        yield publisher
    finally:
        await presence.stop()
        await publisher.stop()


async def place(router: Process, count: int) -> list[str]:
    """Send the prompt ``count`` times, through everything but HTTP; where it went."""
    body = parse(CompletionBody, msgspec.json.encode({"model": MODEL, "prompt": PROMPT}))
    lane = router.lanes.first
    preparer = Preparer(lane.model, lane.settings, lane.core)
    went = []
    for _ in range(count):
        [request] = preparer.completions(body, read_headers({}, router), time.monotonic_ns())
        wakeup = asyncio.Event()
        active = router.lanes.first.gateway.submit(request, wakeup)
        while not active.record.ended:
            wakeup.clear()
            await wakeup.wait()
        went.append(active.decode_id)
        await asyncio.sleep(0.15)  # until the next report
    return went


async def test_two_routers_follow_the_same_index_and_outlive_redis(redis_server, model, tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        registry = Registry(redis_server.url, "test")
        stack.push_async_callback(registry.close)
        routers = []
        for index in range(2):
            directory = RegistryWatcher(registry, tmp_path / f"{index}.json")
            router = process_of(model, directory, LaneTables.of(registry))
            await stack.enter_async_context(router.running())
            routers.append(router)
        workers, publishers = [], []
        for index in range(3):
            worker = await EmulatedWorker(f"decode-{index}", "decode", Script(step_s=0)).start()
            stack.push_async_callback(worker.stop)
            workers.append(worker)
            publishers.append(await stack.enter_async_context(announced(registry, worker)))
        for router in routers:
            await until(lambda router=router: len(router.lanes.first.gateway.workers.usable) == 3)

        await place(routers[0], 1)
        await asyncio.sleep(3.1)  # what that placement promised is forgotten: nothing came of it
        seed = next(s for w in workers for s in w.submissions).hash_seed
        hashes = block_hashes(seed, model.tokenizer.encode(PROMPT))
        publishers[2].publish(stored=hashes, removed=[])
        for router in routers:
            held = workers[2].incarnation
            await until(
                lambda r=router, h=held: (
                    r.lanes.first.prefix_index.prefixes(hashes).get(h, 0) == len(hashes)
                )
            )
            assert await place(router, 5) == ["decode-2"] * 5

        # A router that thought the worker dead learns again what it holds.
        parts = routers[0].lanes.first
        parts.gateway.workers.link("decode-2").die("a mistake")
        assert parts.prefix_index.prefixes(hashes).get(held, 0) == 0
        await until(lambda: parts.prefix_index.prefixes(hashes).get(held, 0) == len(hashes))
        await until(lambda: len(parts.gateway.workers.usable) == 3)

        redis_server.kill()
        assert await place(routers[1], 3) == ["decode-2"] * 3

        await workers[2].stop()
        for router in routers:
            await until(lambda router=router: router.lanes.first.prefix_index.total_hashes == 0)
        assert "decode-2" not in await place(routers[0], 2)


def test_a_request_hashes_its_blocks_once_for_all_workers(model):
    """Seeds depend on the scope and the format, and on nothing that differs between workers."""
    from router.routing.placement.prompt_hashes import HashSeedCache
    from tests.router.emulated_worker import KV_GROUP

    cache = HashSeedCache()
    capabilities = Capabilities(
        kv_groups=[KV_GROUP], numerics_id="exact/x", weights_digest=b"w" * 16
    )
    one = cache.seed(
        SimpleNamespace(past_baton=False, adapter_digest="", cache_scope="a\0"), capabilities
    )
    assert one == cache.seed(
        SimpleNamespace(past_baton=False, adapter_digest="", cache_scope="a\0"), capabilities
    )
    assert one != cache.seed(
        SimpleNamespace(past_baton=False, adapter_digest="", cache_scope="a\0salt"), capabilities
    )
    # Of one object the format is read once: what a worker can it says once for a life.
    capabilities = Capabilities(
        kv_groups=[KV_GROUP], numerics_id="fast/x", weights_digest=b"w" * 16
    )
    assert one != cache.seed(
        SimpleNamespace(past_baton=False, adapter_digest="", cache_scope="a\0"), capabilities
    )
