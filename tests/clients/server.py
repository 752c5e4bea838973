"""The router that clients are tried against: real, with API keys, files, and a shaped worker.

`python -m tests.clients.server` runs one by itself and prints its address.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator

import httpx
import uvicorn

from config.clients import ApiKeyConfig, ClientLimitsConfig
from config.fleet_file import DEFAULT_MODEL
from engine.artifacts.artifact import resolve_model
from fleet.local.redis_server import EmbeddedRedis
from registry.redis_store import Registry
from registry.stored_responses import StoredResponses, StoreLimits
from router.app import Router
from router.http_server import server_config
from router.served_model import ServedModel
from router.settings import RouterSettings
from router.workers.directory import StaticDirectory
from tests.clients.shaped_worker import ShapedWorker
from tests.router.conftest import events_of, record_of, until

MODEL = "default"
KEY = "sk-of-the-clients"


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """The address of a router, for as long as the context lasts; Redis keeps responses."""
    model = ServedModel(resolve_model(DEFAULT_MODEL), (MODEL, "gpt-4o-mini", "claude-sonnet-4-5"))
    with tempfile.TemporaryDirectory() as folder:
        settings = RouterSettings(
            model=DEFAULT_MODEL,
            model_names=model.names,
            fleet_token="secret",
            api_keys={KEY: ApiKeyConfig(tenant="clients")},
            clients=ClientLimitsConfig(cors_origins=("https://page.example",)),
            state_dir=folder,
        )
        directory = StaticDirectory()
        redis = EmbeddedRedis()
        await asyncio.to_thread(redis.start)
        registry = Registry(redis.url, "clients")
        limits = StoreLimits(keep_s=600, tenant_bytes=2**20, total_bytes=2**20)
        stored = StoredResponses(registry, limits)
        router = Router(settings, model, directory, stored_responses=stored)
        server = uvicorn.Server(
            server_config(
                router.app(),
                router.parts.metrics,
                settings.clients,
                port=0,
                timeout_graceful_shutdown=1,
            )
        )
        server.capture_signals = contextlib.nullcontext
        worker = await ShapedWorker("decode-0", model).start()
        directory.put(record_of("decode-0", worker.address))
        task = asyncio.create_task(server.serve())
        try:
            await until(lambda: server.started, timeout_s=30)
            slots = router.parts.gateway.workers
            await until(lambda: slots.get("decode-0") and slots.get("decode-0").state == "ready")
            port = server.servers[0].sockets[0].getsockname()[1]
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            await task
            await worker.stop()
            await registry.close()
            await asyncio.to_thread(redis.stop)


async def abilities(url: str) -> set[str]:
    """What this router has of what is still being built: scenarios that need more are left out."""
    async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {KEY}"}) as http:
        found = set()
        for path in ("responses", "messages"):
            if (await http.post(f"/v1/{path}", json={})).status_code != 404:
                found.add(path)
        user = {"role": "user", "content": "hi"}
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        for name, more in {
            "replay": {"messages": [user | {"name": "x", "annotations": []}]},
            "tools with a schema": {"tools": [tool], "response_format": {"type": "json_object"}},
        }.items():
            body = {"model": MODEL, "messages": [user], "max_tokens": 4, **more}
            if (await http.post("/v1/chat/completions", json=body)).status_code == 200:
                found.add(name)
        body = {"model": MODEL, "messages": [user], "tools": [tool], "stream": True}
        streamed = await http.post("/v1/chat/completions", json=body)
        deltas = [c["delta"] for e in events_of(streamed.text)[:-1] for c in e["choices"]]
        if all(len(delta.get("tool_calls", ())) <= 1 for delta in deltas):
            found.add("one call a chunk")
        return found


async def _main() -> None:
    async with serving() as url:
        print(url, KEY, sorted(await abilities(url)), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main())
