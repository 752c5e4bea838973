"""Fleets for the ladder of sizes: a real router, Redis and workers, and an emulated engine."""

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from config.fleet_file import DEFAULT_MODEL
from registry.event_feed import EventFeed
from registry.redis_store import Registry
from registry.workers import RegistryWatcher
from router.app import Router
from router.http_server import server_config
from router.served_model import ServedModel
from router.settings import RouterSettings
from tests.ladder.watched_worker import LoopHolds
from tests.router.conftest import until
from tests.router.quick_server import QuickServer
from tests.workers.harness import TOKEN, WorkerProcess
from wire.fleet_token import FleetToken

SIZES = (1024, 8192, 17_408, 33_792, 66_560, 131_072)
KV_BLOCKS = 10_000
CONTEXT_TOKENS = 140_000
ANSWER_TOKENS = 3


def prompt_of(tokens: int, salt: int) -> list[int]:
    """A prompt that shares no block with another salt's."""
    return [salt, *((position * 7 + salt) % 251 for position in range(tokens - 1))]


@dataclass
class Answer:
    """What came of one request."""

    text: str
    route: str
    attempts: int
    first_s: float
    usage: dict = field(default_factory=dict)


class LadderFleet:
    """One router in this process, workers in theirs."""

    def __init__(self, router: Router, url: str, workers: dict[str, WorkerProcess]) -> None:
        self.router = router
        self.url = url
        self.workers = workers
        self.table = router.parts.gateway.workers
        self.deaths: list[str] = []
        on_dead = self.table._listener.on_dead

        def note(link, incarnation, reason, *, died):
            self.deaths.append(f"{link.worker_id}: {reason}")
            on_dead(link, incarnation, reason, died=died)

        self.table._listener.on_dead = note

    @property
    def resting(self) -> bool:
        links = [slot.link for slot in self.table if slot.link is not None]
        return len(links) == len(self.workers) and all(link.resting for link in links)

    async def ask(self, prompt: list[int], mode: str, **fields) -> Answer:
        """Send one prompt and read its stream to the end."""
        return await asyncio.to_thread(self._ask, prompt, mode, fields)

    def _ask(self, prompt: list[int], mode: str, fields: dict) -> Answer:
        body = {
            "model": "default",
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "seed": 7,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | fields
        began_s = time.monotonic()
        first_s = 0.0
        text = ""
        usage: dict = {}
        with (
            httpx.Client(timeout=120) as client,
            client.stream(
                "POST",
                f"{self.url}/v1/completions",
                json=body,
                headers={"x-baton-mode": mode, "accept-encoding": "identity"},
            ) as response,
        ):
            if response.status_code != 200:
                raise AssertionError(response.read().decode()[:1000])
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise AssertionError(event)
                first_s = first_s or time.monotonic() - began_s
                text += "".join(choice["text"] for choice in event["choices"])
                usage = event.get("usage") or usage
            name = response.headers["x-request-id"]
            route = response.headers["x-baton-route"]
            story = client.get(f"{self.url}/fleet/requests/{name}").json()
        return Answer(text, route, story["attempts"], first_s, usage)

    def memory_bytes(self) -> dict[str, int]:
        """Memory of each worker's processes without files: the KV pool is one."""
        sums = {}
        for name, worker in self.workers.items():
            process = psutil.Process(worker.process.pid)
            family = [process, *process.children(recursive=True)]
            sums[name] = sum(anonymous_bytes(one.pid) for one in family)
        return sums


def anonymous_bytes(pid: int) -> int:
    """The resident anonymous memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


@contextlib.asynccontextmanager
async def ladder_fleet(artifact, redis_url: str, fleet: str, *names: str, **settings):
    """A fleet whose workers are all live."""
    async with contextlib.AsyncExitStack() as stack:
        registry = Registry(redis_url, fleet)
        stack.push_async_callback(registry.close)
        shared = {
            "redis_url": redis_url,
            "fleet": fleet,
            "kv_blocks": KV_BLOCKS,
            "check_every_step": False,
            "max_step_tokens": 4096,
        } | settings
        program = "tests.ladder.watched_worker"
        started = [WorkerProcess.start(name, program=program, **shared) for name in names]
        workers = dict(zip(names, await asyncio.gather(*started), strict=True))
        for worker in workers.values():
            stack.push_async_callback(worker.stop)
        router_settings = RouterSettings(
            model=DEFAULT_MODEL, model_names=("default",), fleet_token=FleetToken(TOKEN)
        )
        served = ServedModel(
            artifact, ("default",), max_context_tokens=CONTEXT_TOKENS, emulated=True
        )
        router = Router(router_settings, served, RegistryWatcher(registry), EventFeed(registry))
        app = router.app()
        config = server_config(
            app,
            router.parts.metrics,
            router_settings.clients,
            port=0,
            timeout_graceful_shutdown=1,
        )
        server = QuickServer(config)
        server.capture_signals = contextlib.nullcontext
        serving = asyncio.create_task(server.serve())
        try:
            await until(lambda: server.started)
            port = server.servers[0].sockets[0].getsockname()[1]
            made = LadderFleet(router, f"http://127.0.0.1:{port}", workers)
            await until(lambda: made.resting, 20)
            yield made
        finally:
            server.should_exit = True
            await serving


def hold_s(folder: Path, worker: WorkerProcess) -> float:
    """For how long the event loop of a worker was held at most, in CPU time."""
    return float((folder / f"{worker.process.pid}").read_text())


__all__ = ["LoopHolds"]
