"""Fleets for the ladder of sizes: a real router, Redis and workers, and an emulated engine."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from baton.registry.redis_store import Registry
from baton.registry.workers import RegistryWatcher
from baton.wire.fleet_token import FleetToken
from router.app import build_app
from router.frontend.http.protocol import server_config
from router.process import Process
from router.served_model import ServedModel
from router.sources import LaneTables
from tests.router.conftest import process_of, until
from tests.router.quick_server import QuickServer
from tests.workers.harness import TOKEN, WorkerProcess

SIZES = (1024, 8192, 17_408, 33_792, 66_560, 131_072)
KV_BLOCKS = 40_000
CONTEXT_TOKENS = 140_000
ANSWER_TOKENS = 12
IDLE_S = 61.0  # a worker drops a router that sends nothing for a minute
VOCABULARY_S = 15.0  # an engine reads its vocabulary for grammars 10 s after its start
HELD_S = 0.05
PROGRAM = "tests.ladder.watched_worker"
# Clients are in the router's process: to free the authorities of one holds its loop for 20 ms.
NO_AUTHORITIES = False

Start = Callable[..., Awaitable[WorkerProcess]]


def prompt_of(tokens: int, salt: int) -> list[int]:
    """A prompt that shares no block with one of another salt or another length."""
    first = 300 + (tokens * 31 + salt) % 40_000
    return [first, *((position * 7 + salt) % 251 for position in range(tokens - 1))]


@dataclass
class Answer:
    """What came of one request."""

    text: str
    route: str
    story: dict
    usage: dict = field(default_factory=dict)

    @property
    def attempts(self) -> int:
        return self.story["attempts"]

    @property
    def cached_tokens(self) -> int:
        return self.usage["prompt_tokens_details"]["cached_tokens"]


class LadderFleet:
    """One router in this process, workers in theirs."""

    def __init__(self, router: Process, workers: dict[str, WorkerProcess], start: Start) -> None:
        self.router = router
        self.url = ""
        self.workers = workers
        self.start = start
        self.gateway = router.lanes.first.gateway
        self.table = self.gateway.workers
        self.prompt_of = prompt_of
        self.deaths: list[str] = []
        self._avoided = ""
        start = self.table.start
        quote = self.gateway.placer.quote

        def started(listener):
            on_dead = listener.on_dead

            def note(link, incarnation, reason, *, died):
                self.deaths.append(f"{link.worker_id}: {reason}")
                on_dead(link, incarnation, reason, died=died)

            listener.on_dead = note
            start(listener)

        def quote_elsewhere(request, avoid=b""):
            return quote(request, avoid or self.incarnation(self._avoided))

        self.table.start = started
        self.gateway.placer.quote = quote_elsewhere

    def incarnation(self, name: str) -> bytes:
        return self.workers[name].record.incarnation if name else b""

    @contextlib.contextmanager
    def avoiding(self, name: str):
        """No request is placed on this worker; others may pull from it."""
        self._avoided = name
        yield
        self._avoided = ""

    @property
    def resting(self) -> bool:
        links = [slot.link for slot in self.table if slot.link is not None]
        return len(links) == len(self.workers) and all(link.resting for link in links)

    async def rest(self) -> None:
        """Wait until every worker is live and without work."""
        await until(lambda: self.resting, 20)

    async def replace(self, name: str) -> None:
        """Start another life of a worker that was killed."""
        old = self.workers[name]
        await old.process.wait()
        self.workers[name] = await self.start(name, epoch=old.record.epoch + 1)
        await self.rest()

    async def ask(self, size: int, salt: int, mode: str, **fields) -> Answer:
        """Send a prompt of so many tokens and read its stream to the end."""
        return await asyncio.to_thread(self._ask, size, salt, mode, fields)

    def _ask(self, size: int, salt: int, mode: str, fields: dict) -> Answer:
        body = {
            "model": "default",
            "prompt": self.prompt_of(size, salt),
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "seed": 7,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | fields
        text = ""
        usage: dict = {}
        with (
            httpx.Client(timeout=600, verify=NO_AUTHORITIES) as client,
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
                text += "".join(choice["text"] for choice in event["choices"])
                usage = event.get("usage") or usage
            name = response.headers["x-request-id"]
            route = response.headers["x-baton-route"]
            story = client.get(f"{self.url}/fleet/requests/{name}").json()
        return Answer(text, route, story, usage)

    async def baseline(self) -> None:
        """Wait until no worker has work; then none holds a block."""
        await self.rest()
        for worker in self.table.describe()["workers"]:
            blocks = worker["kv_blocks"]
            assert blocks["leased"] == blocks["quarantined"] == 0, worker

    async def memory_bytes(self) -> dict[str, int]:
        """Memory of each worker's processes without files: the KV pool is one."""
        return await asyncio.to_thread(self._memory_bytes)

    def _memory_bytes(self) -> dict[str, int]:
        sums = {}
        for name, worker in self.workers.items():
            process = psutil.Process(worker.process.pid)
            family = [process, *process.children(recursive=True)]
            sums[name] = sum(anonymous_bytes(one.pid) for one in family)
        return sums

    def held_s(self, folder: Path) -> dict[str, float]:
        """For how long a callback held the event loop of each worker at most, and which."""
        files = {name: folder / f"{worker.process.pid}" for name, worker in self.workers.items()}
        told = {name: file.read_text() for name, file in files.items() if file.exists()}
        return {f"{name} {text}": float(text.partition(" ")[0]) for name, text in told.items()}


def anonymous_bytes(pid: int) -> int:
    """The resident anonymous memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


@contextlib.asynccontextmanager
async def ladder_fleet(
    artifact,
    redis_url: str,
    fleet: str,
    *names: str,
    roles=None,
    context_tokens: int = CONTEXT_TOKENS,
    **settings,
):
    """A fleet whose workers are all live; ``roles`` are settings of the workers of one role."""
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

        async def start(name: str, **more) -> WorkerProcess:
            own = (roles or {}).get(name.partition("-")[0], {})
            fields = shared | own | more
            worker = await WorkerProcess.start(name, program=PROGRAM, **fields)
            stack.push_async_callback(worker.stop)
            return worker

        started = await asyncio.gather(*map(start, names))
        served = ServedModel(
            artifact, ("default",), max_context_tokens=context_tokens, emulated=True
        )
        router = process_of(
            served,
            RegistryWatcher(registry),
            LaneTables.of(registry),
            fleet_token=FleetToken(TOKEN),
        )
        app = build_app(router)
        config = server_config(
            app,
            router.metrics,
            router.settings.clients,
            port=0,
            timeout_graceful_shutdown=1,
        )
        made = LadderFleet(router, dict(zip(names, started, strict=True)), start)
        server = QuickServer(config)
        server.capture_signals = contextlib.nullcontext
        serving = asyncio.create_task(server.serve())
        try:
            await until(lambda: server.started)
            port = server.servers[0].sockets[0].getsockname()[1]
            made.url = f"http://127.0.0.1:{port}"
            await made.rest()
            yield made
        finally:
            server.should_exit = True
            await serving
