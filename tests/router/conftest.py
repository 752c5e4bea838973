"""A real router over HTTP, emulated workers over real gRPC, the real tokenizer and template."""

import asyncio
import contextlib
import functools
import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastapi.routing
import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from baton.config.fleet_file import DEFAULT_MODEL
from baton.model.artifact import resolve_model
from baton.registry.redis_store import Registry
from baton.registry.types import WorkerRecord
from baton.wire.fleet_token import FleetToken
from router import served_model
from router.app import build_app
from router.frontend.http.protocol import server_config
from router.process import Process
from router.served_model import ServedModel
from router.settings import ProcessSettings
from router.sources import LaneSources, LaneTables, Sources
from tests.router.emulated_worker import EmulatedWorker, Script
from tests.router.page.chromium import Browser
from tests.router.quick_server import QuickServer
from tests.router.settings import settings_of
from tests.router.static_directory import StaticDirectory

MODEL = "smollm2"
OPS = {"authorization": "Bearer secret"}  # the fleet's token


def _once(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what a function returns, and its arguments, whose ids may be in the key."""
    kept: dict[Any, tuple[Any, ...]] = {}

    @functools.wraps(function)
    def call(*arguments: Any, **more: Any) -> Any:
        name = key(*arguments, **more)
        if name not in kept:
            kept[name] = (function(*arguments, **more), arguments)
        return kept[name][0]

    return call


# The tests build hundreds of routers, whose endpoints have the same parameters and responses, and
# most of which have the same tokenizer: together a third of the CPU time of a test.
_read_parameters = _once(
    fastapi.routing._build_dependant_with_parameterless_dependencies,
    lambda *, path, call, dependencies: (path, call.__code__),
)


def _parameters_of(*, call: Callable[..., Any], **more: Any) -> tuple[Any, ...]:
    dependant, *others = _read_parameters(call=call, **more)
    return replace(dependant, call=call), *others


fastapi.routing._build_dependant_with_parameterless_dependencies = _parameters_of
fastapi.routing.compile_path = functools.cache(fastapi.routing.compile_path)
fastapi.routing.create_model_field = functools.cache(fastapi.routing.create_model_field)
served_model.load_tokenizer = _once(
    served_model.load_tokenizer, lambda source, **more: (id(source), *more.items())
)


@pytest.fixture(scope="session")
def artifact():
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def model(artifact):
    return ServedModel(artifact, (MODEL, "alias"))


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
async def tab(browser):
    """A page in a browser; nothing may have gone wrong in it."""
    async with browser.tab() as opened:
        yield opened
    assert opened.problems == []


def process_of(model: ServedModel, directory, tables=None, **settings) -> Process:
    """A router with one lane."""
    core, lane = settings_of(*model.names, **settings)
    return Process(core, None, [(lane, model, LaneSources(directory, tables))], None)


def sources_of(registry: Registry, **parts) -> Sources:
    """The sources in Redis, with ``parts`` in place of some."""
    sources = Sources(ProcessSettings(), registry, lambda _: None)
    vars(sources).update(parts)
    return sources


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def record_of(worker_id: str, address: str, role: str = "decode", **more) -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id, role=role, state="ready", epoch=1, address=address, **more
    )


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Wait until ``condition()`` holds."""
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, "it did not come true in time"
        await asyncio.sleep(0.01)


class Fleet:
    """One router and its workers."""

    def __init__(
        self, router: Process, app: FastAPI, server: uvicorn.Server, directory: StaticDirectory
    ) -> None:
        self.router = router
        self.lane = router.lanes.first
        self.app = app
        self.directory = directory
        self.workers: dict[str, EmulatedWorker] = {}
        self.processes: list[asyncio.subprocess.Process] = []
        self.server = server
        port = server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.AsyncClient(base_url=self.url, timeout=20)

    async def add(self, worker_id: str, script: Script | None = None) -> EmulatedWorker:
        role = worker_id.split("-")[0]
        worker = await EmulatedWorker(worker_id, role, script).start()
        self.workers[worker_id] = worker
        self.directory.put(record_of(worker_id, worker.address, role))
        await until(lambda: self.state(worker_id) == "ready")
        return worker

    async def spawn(self, worker_id: str, *arguments: str) -> asyncio.subprocess.Process:
        """A worker in a process of its own."""
        role = worker_id.split("-")[0]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("emulated_worker.py")),
            *("--port", "0", "--id", worker_id, "--role", role, *arguments),
            stdout=asyncio.subprocess.PIPE,
        )
        self.processes.append(process)
        address = (await process.stdout.readline()).decode().strip()
        self.directory.put(record_of(worker_id, address, role))
        await until(lambda: self.state(worker_id) == "ready")
        return process

    def state(self, worker_id: str) -> str:
        slot = self.lane.gateway.workers.get(worker_id)
        return slot.state if slot is not None else ""

    async def chat(self, text: str = "hi", headers: dict | None = None, **body) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return await self.http.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": messages, "seed": 1, "max_tokens": 4} | body,
            headers=headers or {},
        )

    async def complete(self, prompt="hi", headers: dict | None = None, **body) -> httpx.Response:
        return await self.http.post(
            "/v1/completions",
            json={"model": MODEL, "prompt": prompt, "seed": 1} | body,
            headers=headers or {},
        )

    async def close(self) -> None:
        await self.http.aclose()
        self.server.should_exit = True
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        for worker in self.workers.values():
            await worker.stop()


@pytest.fixture
async def make_fleet(model):
    """Call with worker ids and scripts: ``await make_fleet({"decode-0": Script()}, port=…)``."""
    fleets: list[tuple[Fleet, asyncio.Task]] = []
    registries: list[Registry] = []

    async def make(
        workers: dict[str, Script | None],
        served=model,
        others=(),
        registry: Registry | None = None,
        tables: LaneTables | None = None,
        **more,
    ) -> Fleet:
        """``more``: settings, and sources in place of those in ``registry``."""
        sources = sources_of(registry) if registry is not None else None
        for name in more.keys() & (vars(sources).keys() if sources is not None else set()):
            setattr(sources, name, more.pop(name))
        registries.extend(filter(None, (registry, tables and tables.tickets)))
        api_keys = more.pop("api_keys", None)
        core, settings = settings_of(*served.names, **{"fleet_token": FleetToken("secret")} | more)
        directory = StaticDirectory()
        first = (settings, served, LaneSources(directory, tables))
        process = Process(core, api_keys, [first, *others], sources)
        app, metrics = build_app(process), process.metrics
        server = QuickServer(
            server_config(app, metrics, core.settings.clients, port=0, timeout_graceful_shutdown=1)
        )
        server.capture_signals = contextlib.nullcontext
        task = asyncio.create_task(server.serve())
        await until(lambda: server.started, 15.0)  # Redis may hang: three tables wait for it
        fleet = Fleet(process, app, server, directory)
        fleets.append((fleet, task))
        for worker_id, script in workers.items():
            await fleet.add(worker_id, script)
        return fleet

    yield make
    for fleet, task in fleets:
        await fleet.close()
        await task
    for used in registries:  # a router connects again if a test has closed its registry before it
        await used.close()


def events_of(text: str) -> list:
    """The events of an SSE body; ``"[DONE]"`` as it stands, comments left out."""
    events = []
    for line in text.splitlines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
    return events
