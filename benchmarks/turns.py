"""Changes of role in a fleet under load.

    python -m benchmarks.turns --out FILE [--turns 60] [--every 2] [--kill controller,router]

Starts a fleet of two prefill and two decode workers with emulated engines and two routers, loads it
with conversations, and changes the sizes of its pools again and again. It reports

- ``first_prompt_s``: from the order to the sending of the first request that the turned worker
  served in its new role (50 % and 99 % of the turns, and the longest)
- ``failed``: requests with an error
- ``computed_twice``: prompt tokens that workers computed beyond those that responses account for
- ``differing``: responses that differ from those of the same prompts without turns
- ``cached_share``: prompt tokens found in caches, without turns and with them
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import psutil
import typer

from baton.engine.llm import DEFAULT_MODEL
from loadtest.commands.running import ended_by_signals

_HEADERS = {"authorization": "Bearer key-of-the-bench", "x-baton-mode": "disaggregated"}
_FLEET = """
fleet: turns
model: {model}
served_model_name: [emulated, default]
max_context_tokens: 8192
pools: {{prefill: 2, decode: 2, engine: emulated, routers: 2}}
kv_blocks_per_worker: 1024
cpus_per_rank: 0.04
host: 127.0.0.1
port: 0
redis: embedded
api_keys:
  key-of-the-bench: {{role: operator}}
"""
_SIZES = ((1, 3), (2, 2), (3, 1), (2, 2))  # each is one turn away from the one before
_USERS = 6
_PASSERS_BY = 4
_TURNS_OF_A_TALK = 5
_ANSWER_TOKENS = 24
_ATTEMPTS = 3  # as the openai client: the connections to a killed router break
_START_LIMIT_S = 180.0
_COMPUTED = re.compile(r'(?m)^baton_prefix_tokens_total\{[^}]*source="computed"[^}]*\} (\S+)$')


@dataclass(slots=True)
class Served:
    """A request that was served, or failed."""

    sent_s: float
    talk: int
    turn: int
    text: str = ""
    error: str = ""
    prefill: str = ""
    decode: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retried: int = 0


@dataclass(slots=True)
class Load:
    """Conversations of some users, until ``over`` is set."""

    url: str
    http: httpx.AsyncClient
    served: list[Served] = field(default_factory=list)
    over: bool = False

    async def user(self, number: int, seed: int) -> None:
        """Hold one conversation after another."""
        draw = random.Random(f"{seed}/{number}")
        for talk in itertools.count(number, _USERS):
            messages = [{"role": "system", "content": _words(f"system {talk % 4}", 400)}]
            for turn in range(_TURNS_OF_A_TALK):
                await asyncio.sleep(draw.uniform(0.5, 1.5))
                if self.over:
                    return
                messages.append({"role": "user", "content": _words(f"{seed} {talk} {turn}", 60)})
                found = await self._ask(messages, talk, turn)
                self.served.append(found)
                # A fixed reply: a response that differs must not change the prompts after it.
                messages.append({"role": "assistant", "content": _words(f"reply {turn}", 20)})

    async def passer_by(self, number: int, seed: int) -> None:
        """Send prompts without a cached prefix."""
        draw = random.Random(f"{seed}/passer-by {number}")
        for turn in itertools.count():
            await asyncio.sleep(draw.uniform(0.1, 0.5))
            if self.over:
                return
            message = {"role": "user", "content": _words(f"{seed} {number} {turn} new", 40)}
            self.served.append(await self._ask([message], -1 - number, turn))

    async def _ask(self, messages: list[dict[str, str]], talk: int, turn: int) -> Served:
        body = {
            "model": "emulated",
            "messages": messages,
            "max_tokens": _ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        found = Served(time.monotonic(), talk, turn)
        for attempt in range(_ATTEMPTS):
            try:
                answer = await self.http.post(f"{self.url}/v1/chat/completions", json=body)
                break
            except httpx.TransportError as error:
                found.retried = attempt + 1
                if found.retried == _ATTEMPTS:
                    found.error = repr(error)
                    return found
        if answer.status_code != 200:
            found.error = answer.text[:200]
            return found
        content = answer.json()
        route = dict(re.findall(r"(\w+)=([\w-]+)", answer.headers["x-baton-route"]))
        found.prefill = route["prefill"]
        found.decode = route["decode"]
        found.text = content["choices"][0]["message"]["content"]
        found.prompt_tokens = content["usage"]["prompt_tokens"]
        found.cached_tokens = content["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found


def _words(seed: str, count: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(_VOCABULARY) for _ in range(count))


_VOCABULARY = [
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
]


def _start(folder: Path, output: Path) -> subprocess.Popen[bytes]:
    file = folder / "fleet.yaml"
    file.write_text(_FLEET.format(model=DEFAULT_MODEL))
    with output.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "fleet.cli.main", "up", str(file)],
            env={**os.environ, "BATON_HOME": str(folder / "home")},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )


@asynccontextmanager
async def _fleet(folder: Path) -> AsyncIterator[str]:
    """Run a fleet, and yield its URL."""
    output = folder / "output"
    process = _start(folder, output)
    try:
        until_s = time.monotonic() + _START_LIMIT_S
        while not (found := re.search(r"Baton is ready at (\S+)/v1", output.read_text())):
            if process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(output.read_text())
            await asyncio.sleep(0.2)
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def _order(http: httpx.AsyncClient, url: str, prefill: int, decode: int) -> dict[str, Any]:
    """Order pool sizes until the controller answers, which may be a new one."""
    body = {
        "verb": "scale",
        "arguments": {"prefill": prefill, "decode": decode},
        "timeout_s": 20.0,
    }
    for _ in range(20):
        with contextlib.suppress(httpx.TransportError):
            answer = await http.post(f"{url}/fleet/orders", json=body)
            if answer.status_code == 200:
                return dict(answer.json()["data"] or {})
        await asyncio.sleep(0.5)
    raise RuntimeError("the controller did not answer")


async def _computed(http: httpx.AsyncClient, url: str) -> float:
    """Return the prompt tokens that all workers have computed."""
    targets = (await http.get(f"{url}/fleet/targets")).json()
    total = 0.0
    for target in targets:
        if target["labels"]["component"] == "worker":
            page = await http.get(f"http://{target['targets'][0]}/metrics")
            total += sum(map(float, _COMPUTED.findall(page.text)))
    return total


def _kill(what: str, home: Path) -> None:
    """Kill the controller, or one of the routers, of the fleet in a folder."""
    mark = {"router": "-m router", "controller": "ControllerActor"}[what]
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        environment: dict[str, str] = {}
        with contextlib.suppress(psutil.Error):
            if mark in command:
                environment = process.environ()
        if any(str(home) in value for value in environment.values()):
            process.kill()
            return
    raise RuntimeError(f"found no {what}")


async def _phase(load: Load, seed: int, during: Coroutine[Any, Any, None]) -> list[Served]:
    """Load the fleet until ``during`` is done."""
    load.served = []
    load.over = False
    async with asyncio.TaskGroup() as users:
        for number in range(_USERS):
            users.create_task(load.user(number, seed))
        for number in range(_PASSERS_BY):
            users.create_task(load.passer_by(number, seed))
        await during
        load.over = True
    return load.served


def _share(served: list[Served]) -> float:
    tokens = sum(one.prompt_tokens for one in served)
    return round(sum(one.cached_tokens for one in served) / max(tokens, 1), 4)


def _firsts(served: list[Served], turned: list[tuple[float, str, str]]) -> Iterator[float]:
    """Yield the time from each order to the first request in the new role, if one came."""
    for index, (ordered_s, worker, role) in enumerate(turned):
        later = [at_s for at_s, name, _ in turned[index + 1 :] if name == worker]
        until_s = later[0] if later else float("inf")
        sent = [
            one.sent_s
            for one in served
            if ordered_s <= one.sent_s < until_s
            and (one.prefill if role == "prefill" else one.decode) == worker
            and one.prefill != one.decode
        ]
        if sent:
            yield min(sent) - ordered_s


async def measure(turns: int, every_s: float, kill: list[str]) -> dict[str, Any]:
    """Run the fleet and the load; return the figures."""
    with TemporaryDirectory(prefix="bt-") as name:
        folder = Path(name)
        limits = httpx.Limits(max_connections=_USERS + _PASSERS_BY + 4)
        async with (
            _fleet(folder) as url,
            httpx.AsyncClient(headers=_HEADERS, timeout=60, limits=limits, trust_env=False) as http,
        ):
            load = Load(url, http)
            steady_s = min(turns * every_s, 60.0)
            await _phase(load, 0, asyncio.sleep(10.0))
            before = await _phase(load, 1, asyncio.sleep(steady_s))
            computed = await _computed(http, url)
            part = turns // (len(kill) + 1)
            killed_at = {part * (place + 1): what for place, what in enumerate(kill)}
            turned: list[tuple[float, str, str]] = []
            answered: list[float] = []

            async def order_turns() -> None:
                for number in range(turns):
                    await asyncio.sleep(every_s)
                    ordered_s = time.monotonic()
                    sizes = _SIZES[number % len(_SIZES)]
                    async with asyncio.TaskGroup() as group:
                        order = group.create_task(_order(http, url, *sizes))
                        if number in killed_at:
                            await asyncio.sleep(0.1)
                            _kill(killed_at[number], folder / "home")
                    answer = order.result()
                    answered.append(time.monotonic() - ordered_s)
                    for worker, role in answer.get("turned", {}).items():
                        turned.append((ordered_s, worker, role))

            during = await _phase(load, 2, order_turns())
            computed = await _computed(http, url) - computed
            after = await _phase(load, 2, asyncio.sleep(steady_s * 1.5))
    texts = {(one.talk, one.turn): one.text for one in after if not one.error}
    same = [one for one in during if not one.error and (one.talk, one.turn) in texts]
    firsts = sorted(_firsts(during, turned))
    uncached = sum(one.prompt_tokens - one.cached_tokens for one in during)
    return {
        "turns": len(turned),
        "answered_p50_s": round(statistics.median(answered), 3),
        "first_prompt_s": {
            "p50": round(statistics.median(firsts), 3),
            "p99": round(firsts[min(int(len(firsts) * 0.99), len(firsts) - 1)], 3),
            "max": round(firsts[-1], 3),
            "seen": len(firsts),
        },
        "requests": len(during),
        "failed": [one.error for one in (*before, *during, *after) if one.error],
        "retried": sum(one.retried for one in during),
        "computed_twice": round(computed - uncached),
        "computed": round(computed),
        "compared": len(same),
        "differing": sum(one.text != texts[one.talk, one.turn] for one in same),
        "cached_share": {"before": _share(before), "turning": _share(during)},
        "killed": kill,
    }


def main(
    out: Annotated[Path, typer.Option(help="JSON file for the figures.")],
    turns: Annotated[int, typer.Option(min=1, help="Number of turns.")] = 60,
    every: Annotated[float, typer.Option(help="Seconds between two turns.")] = 2.0,
    kill: Annotated[str, typer.Option(help="What is killed in the middle, by comma.")] = "",
) -> None:
    """Measure changes of role under load."""
    with ended_by_signals():
        found = asyncio.run(measure(turns, every, [name for name in kill.split(",") if name]))
    out.write_text(json.dumps(found, indent=2) + "\n")
    typer.echo(json.dumps(found, indent=2))


if __name__ == "__main__":
    typer.run(main)
