"""The router that clients are tried against: real, with API keys, files, and a shaped worker.

`python -m tests.clients.server` runs one by itself and prints its address.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from typing import Any

import uvicorn

from baton.config.clients import ApiKeyConfig, ClientLimitsConfig
from baton.config.fleet_file import DEFAULT_MODEL
from baton.model.artifact import resolve_model
from baton.registry.redis_store import Registry
from baton.registry.stored_responses import StoredResponses, StoreLimits
from baton.wire.fleet_token import FleetToken
from fleet.local.redis_server import EmbeddedRedis
from router.app import build_app
from router.frontend.http.protocol import server_config
from router.process import Process
from router.served_model import ServedModel
from router.sources import LaneSources
from tests.clients.shaped_worker import ShapedWorker
from tests.router.conftest import record_of, sources_of, until
from tests.router.emulated_worker import EmulatedWorker
from tests.router.settings import settings_of
from tests.router.static_directory import StaticDirectory

MODEL = "default"
KEY = "sk-of-the-clients"


@contextlib.asynccontextmanager
async def serving(
    model: ServedModel | None = None, worker: EmulatedWorker | None = None, **more: Any
) -> AsyncIterator[str]:
    """The address of a router, for as long as the context lasts; Redis keeps responses.

    ``worker`` answers as decode-0 in place of a `ShapedWorker`; ``more`` goes to the settings.
    """
    if model is None:
        names = (MODEL, "gpt-4o-mini", "claude-sonnet-4-5")
        model = ServedModel(resolve_model(DEFAULT_MODEL), names)
    with tempfile.TemporaryDirectory() as folder:
        api_keys = {KEY: ApiKeyConfig(tenant="clients")}
        core, settings = settings_of(
            *model.names,
            fleet_token=FleetToken("secret"),
            clients=ClientLimitsConfig(cors_origins=("https://page.example",)),
            state_dir=folder,
            **more,
        )
        directory = StaticDirectory()
        redis = EmbeddedRedis()
        await asyncio.to_thread(redis.start)
        registry = Registry(redis.url, "clients")
        limits = StoreLimits(keep_s=600, tenant_bytes=2**20, total_bytes=2**20)
        stored = StoredResponses(registry, limits)
        router = Process(
            core,
            api_keys,
            [(settings, model, LaneSources(directory, None))],
            sources_of(registry, responses=stored),
        )
        server = uvicorn.Server(
            server_config(
                build_app(router),
                router.metrics,
                core.settings.clients,
                port=0,
                timeout_graceful_shutdown=1,
            )
        )
        server.capture_signals = contextlib.nullcontext
        worker = worker or ShapedWorker("decode-0", model)
        await worker.start()
        directory.put(record_of("decode-0", worker.address))
        task = asyncio.create_task(server.serve())
        try:
            await until(lambda: server.started, timeout_s=30)
            slots = router.lanes.first.gateway.workers
            await until(lambda: slots.get("decode-0") and slots.get("decode-0").state == "ready")
            port = server.servers[0].sockets[0].getsockname()[1]
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            await task
            await worker.stop()
            await registry.close()
            await asyncio.to_thread(redis.stop)


async def _main() -> None:
    async with serving() as url:
        print(url, KEY, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main())
