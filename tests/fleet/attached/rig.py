"""Emulated vLLM servers in a thread, and a fleet that attaches them."""

import asyncio
import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx

from baton.config.fleet_file import DEFAULT_MODEL
from benchmarks.emulated_vllm import EmulatedServer, Emulation, next_token
from tests.fleet.test_up import Served, wait_for

T = TypeVar("T")
MODEL = "tiny"
PROMPT = list(range(200, 300))


def neighbours(count: int) -> int:
    """Return the first of so many free ports in a row."""
    while True:
        with contextlib.ExitStack() as held, contextlib.suppress(OSError, OverflowError):
            first = held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for port in range(first + 1, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return int(first)


class ServerThread:
    """Event loop in a thread, with emulated servers whose faults a test switches."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._servers: list[EmulatedServer] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    def start(self, emulation: Emulation, port: int = 0) -> "Emulated":
        async def begin() -> tuple[EmulatedServer, str]:
            server = EmulatedServer(emulation, port)
            return server, await server.start()

        server, url = self.run(begin())
        self._servers.append(server)
        return Emulated(self, server, url)

    def close(self) -> None:
        for server in self._servers:
            server.vllm.emulation.fault = ""
            self.run(server.stop())
        self.run(_end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


async def _end_tasks() -> None:
    """End what uvicorn leaves behind."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


class Emulated:
    """One emulated server."""

    def __init__(self, thread: ServerThread, server: EmulatedServer, url: str) -> None:
        self.url = url
        self._thread = thread
        self._server = server

    @property
    def emulation(self) -> Emulation:
        return self._server.vllm.emulation

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return self._server.vllm.bodies

    @property
    def ranks(self) -> list[Any]:
        return self._server.vllm.ranks

    @property
    def running(self) -> int:
        return self._server.vllm.running

    @property
    def sent(self) -> int:
        return self._server.vllm.sent

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def evict(self) -> None:
        """Forget all blocks, as if others had needed them."""
        self._server.vllm.ranks[0].cache.clear()

    def stop(self) -> None:
        self._thread.run(self._server.stop())


class AttachedFleet:
    """`baton up` of a fleet of attached servers, or `baton epp` with its ``options``."""

    def __init__(
        self,
        folder: Path,
        servers: object,
        engine: str = "vllm",
        options: Sequence[str] = ("up",),
        **more: object,
    ) -> None:
        config = {
            "fleet": "attached",
            "model": DEFAULT_MODEL,
            "served_model_name": MODEL,
            "numerics": "fast",
            "port": 0,
            "pools": {"engine": engine, engine.replace("-", "_"): {"servers": servers}},
            **more,
        }
        command = [sys.executable, "-m", "fleet.cli.main", *options]
        self.folder = folder
        self.served = Served(command, folder, json.dumps(config, indent=1))
        self.url = ""

    def wait_ready(self) -> None:
        self.url = self.served.wait_ready(60)

    def close(self) -> None:
        self.served.process.terminate()
        self.served.process.wait(30)

    def workers(self) -> dict[str, dict[str, Any]]:
        """Return the workers by the address or label of their server."""
        answer = httpx.get(f"{self.url}/fleet", trust_env=False, timeout=10).json()
        return {worker["host"]: worker for worker in answer["workers"]}

    def ready(self) -> set[str]:
        return {name for name, one in self.workers().items() if one["state"] == "ready"}

    def wait_for_servers(self, *servers: Emulated, limit_s: float = 15) -> None:
        """Wait until exactly these servers take requests."""
        names = {server.url.removeprefix("http://") for server in servers}
        wait_for(lambda: self.ready() == names, limit_s)

    def complete(self, max_tokens: int = 40, prompt: list[int] = PROMPT, **more: Any) -> list[int]:
        """Return the tokens of a response."""
        ids: list[int] = self.respond(max_tokens, prompt, **more)["choices"][0]["token_ids"]
        return ids

    def respond(
        self, max_tokens: int = 40, prompt: list[int] = PROMPT, **more: Any
    ) -> dict[str, Any]:
        """Return a response."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
            **more,
        }
        answer = httpx.post(f"{self.url}/v1/completions", json=body, trust_env=False, timeout=90)
        assert answer.status_code == 200, answer.text
        response: dict[str, Any] = answer.json()
        return response


def expected(count: int, prompt: list[int] = PROMPT) -> list[int]:
    """Return the tokens that every emulated server gives behind a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, 49152))
    return tokens[len(prompt) :]


class Background:
    """Call in a thread, whose result or exception a test reads later."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()
        self.began_s = time.monotonic()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._result = work()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self._thread.join(90)
        assert not self._thread.is_alive(), "the request has no end"
        if self._error is not None:
            raise self._error
        return self._result
