"""Erasure of deleted tenants' KV at one worker: earlier deletions, and those while it runs."""

import asyncio
import contextlib

import msgspec
import pytest

from baton.engine.process import messages
from baton.engine.process.handle import EngineHandle
from baton.engine.process.link import InnerLink
from baton.registry.redis_store import Registry
from baton.tenants.deletions import Forgotten
from baton.tenants.erasures import Erasures
from baton.types.geometry import KvGeometry
from fleet.local.redis_server import EmbeddedRedis
from fleet.worker.worker import erase_forever

SHAPE = KvGeometry(num_layers=1, num_kv_heads=1, head_dim=8, num_blocks=4, dtype="bf16")


async def delete(registry: Registry, *tags: str) -> None:
    raw = msgspec.json.encode(Forgotten(tags={tag: f"deletion-{tag}" for tag in tags}))
    await registry.send(("HSET", registry.key("tenants"), "forgotten", raw))


@pytest.mark.parametrize(
    ("earlier", "erased"), [(True, [{"01020304"}, {"05060708"}]), (False, [{"05060708"}])]
)
async def test_the_cache_of_an_attached_server_is_not_reset_for_earlier_deletions(
    redis_server: EmbeddedRedis, earlier: bool, erased: list[set[str]]
) -> None:
    registry = Registry(redis_server.url, f"erasure-{earlier}".lower())
    ready = messages.Ready(
        pid=1,
        geometry=SHAPE,
        numerics_id="vllm/0.32.0",
        weights_digest=bytes(16),
        eos_token_ids=(),
        max_context_tokens=16,
        threads=0,
        load_s=0.0,
    )
    link = InnerLink(ready)
    seen: list[set[str]] = []

    def handle(command: messages.Command) -> None:
        assert isinstance(command, messages.EraseBlocks)
        seen.append({tag.hex() for tag in command.tags})
        link.report(messages.BlocksErased({"pool": 1}))

    link.handle = handle
    await delete(registry, "01020304")
    work = erase_forever(EngineHandle(link), Erasures(registry), "worker-0", earlier=earlier)
    task = asyncio.create_task(work)
    await asyncio.sleep(0.5)
    await delete(registry, "01020304", "05060708")
    async with asyncio.timeout(10):
        while len(seen) < len(erased):
            await asyncio.sleep(0.02)
    assert seen == erased
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await registry.close()
