"""Routers in front of the same servers: Baton, vllm-router, SMG, and round robin.

    python -m benchmarks.attached peers [--sides baton,smg] [--loads sessions] [--rounds 3]

Four emulated vLLM servers, each a process, get the same texts from each router, and make tokens of
texts as vLLM does (``tokenizers``, in a thread). The shares of
cached tokens are counted by the servers. The peers have their default policies (``cache_aware``);
``vllm-router kv`` reads KV events, and ``round robin`` is that policy of vllm-router. They run from
an environment below ``$BATON_CACHE``, into which the first run installs them.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec
import psutil

from baton.config.fleet_file import DEFAULT_MODEL
from baton.folders import cache_root
from baton.model.artifact import resolve_model
from baton.text.tokenizer import TextTokenizer, load_tokenizer
from benchmarks.emulated_vllm import STRANGER, next_token
from benchmarks.router.load import VOCABULARY, percentile
from benchmarks.router.processes import free_port

NAME = "smollm2"
WHEELS = ("vllm-router==0.1.17", "smg==1.13.0")
SIDES = "baton,baton without events,vllm-router,vllm-router kv,smg,round robin"
BLOCK_TOKENS = 32
CONTEXT_TOKENS = 100_000
FIRST_PORT = 20_610
_SETTLE_S = 4.0  # after its start Baton has a slower tokenizer for some seconds
_READY_S = 60.0


class Fleet:
    """`baton up` of attached servers, in a folder of its own."""

    def __init__(self, folder: Path, servers: object, **more: object) -> None:
        config = {
            "fleet": "attached-bench",
            "model": DEFAULT_MODEL,
            "served_model_name": NAME,
            "numerics": "fast",
            "port": 0,
            "pools": {"engine": "vllm", "vllm": {"servers": servers}},
            **more,
        }
        self._output = folder / "output"
        (folder / "fleet.yaml").write_text(json.dumps(config))
        self._began_s = time.monotonic()
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fleet.cli.main", "up", str(folder / "fleet.yaml")],
                env={**os.environ, "BATON_HOME": str(folder)},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    async def ready(self, workers: int, limit_s: float = _READY_S) -> tuple[str, float]:
        """Return the URL, and the seconds until so many servers took requests.

        Raises:
            RuntimeError: The fleet has ended, or is not ready in time; it names what is missing.
        """
        url = ""
        page: dict[str, list[dict[str, object]]] = {"workers": []}
        async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
            while True:
                await asyncio.sleep(0.02)
                if time.monotonic() - self._began_s > limit_s:
                    lack = [f"{one['id']} {one['state']}" for one in page["workers"]]
                    known = ", ".join(lack) if url else "no URL"
                    raise RuntimeError(
                        f"not {workers} servers ready after {limit_s:g} s: {known or 'no server'}\n"
                        f"{self._output.read_text()}"
                    )
                if not url:
                    found = re.findall(r"Baton is ready at (\S+)/v1", self._output.read_text())
                    url = found[0] if found else ""
                    if self.process.poll() is not None:
                        raise RuntimeError(self._output.read_text())
                    continue
                page = (await client.get(f"{url}/fleet")).json()
                if sum(one["state"] == "ready" for one in page["workers"]) == workers:
                    return url, time.monotonic() - self._began_s

    def attached(self) -> psutil.Process:
        """Return the process of the servers."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(one for one in children if "fleet.attached.process" in one.cmdline())

    def stop(self) -> None:
        """End the fleet and its servers."""
        self.process.terminate()
        self.process.wait(30)


class Load(NamedTuple):
    """Requests of one kind, and the servers that get them.

    Attributes:
        send: Sends them all.
        blocks: Blocks of each server.
        prefill_tokens_per_s: Its speed.
        kills: Whether one server is killed on the way.
    """

    send: "Callable[[Clients], Awaitable[None]]"
    blocks: int
    prefill_tokens_per_s: int
    kills: bool = False


@dataclass
class Clients:
    """Clients of one router, and what they have seen.

    Attributes:
        words: Token of each word that a text may have.
        failed: Requests without a response.
        cut: Responses without an end.
        wrong: Responses with other text than the servers generate.
        checks: Whether the text is known.
        kill: Kills a server; does nothing if the load kills none.
    """

    client: httpx.AsyncClient
    url: str
    words: dict[str, int]
    seed: int
    kill: Callable[[], None] = lambda: None
    checks: bool = True
    ttft_s: list[float] = field(default_factory=list)
    requests: int = 0
    failed: int = 0
    cut: int = 0
    wrong: int = 0

    def __post_init__(self) -> None:
        self.choose = random.Random(self.seed)

    def text(self, words: int) -> str:
        """Return a text of so many words, each of which is one token."""
        return "".join(f" {word}" for word in self.choose.choices(list(self.words), k=words))

    async def ask(self, prompt: str, max_tokens: int) -> str:
        """Send a prompt, and return the text of the response."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0}
        began_s = time.perf_counter()
        self.requests += 1
        text = ""
        has_ended = False
        try:
            url = f"{self.url}/v1/completions"
            async with self.client.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    self.failed += 1
                    return text
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    for choice in json.loads(line[6:]).get("choices", ()):
                        if not text and choice["text"]:
                            self.ttft_s.append(time.perf_counter() - began_s)
                        text += choice["text"]
                        has_ended = has_ended or bool(choice["finish_reason"])
        except httpx.HTTPError:
            pass
        if not has_ended:
            self.failed += not text
            self.cut += bool(text)
        elif self.checks and text != self._expected(prompt, max_tokens):
            self.wrong += 1
        return text

    def _expected(self, prompt: str, count: int) -> str:
        names = list(self.words)
        tokens = [self.words[word] for word in prompt.split()]
        text = ""
        for _ in range(count):
            name = names[next_token(tokens, 49152) % len(names)]
            tokens.append(self.words[name])
            text += f" {name}"
        return text


async def sessions(
    clients: Clients, *, count: int = 24, at_once: int = 8, turns: int = 6, response: int = 24
) -> None:
    """Send turns of sessions with growing prompts."""
    prompts = [""] * count
    gate = asyncio.Semaphore(at_once)

    async def turn(number: int, *, kills: bool) -> None:
        async with gate:
            if kills:
                clients.kill()
            prompts[number] += clients.text(320)
            prompts[number] += await clients.ask(prompts[number], response)

    for at in range(turns):
        order = list(range(len(prompts)))
        clients.choose.shuffle(order)
        half = len(order) // 2 if at == turns // 2 else -1
        await asyncio.gather(*(turn(n, kills=place == half) for place, n in enumerate(order)))


async def burst(clients: Clients) -> None:
    """Send 32 prompts at once that share a prefix of 2,048 tokens, for each of four prefixes."""
    for _ in range(4):
        prefix = clients.text(2048)
        await asyncio.gather(*(clients.ask(prefix + clients.text(64), 16) for _ in range(32)))


async def documents(clients: Clients, count: int, words: int) -> None:
    """Send three questions on each document, one after another, four documents at a time."""
    gate = asyncio.Semaphore(4)

    async def about(document: str) -> None:
        async with gate:
            for _ in range(3):
                await clients.ask(document + clients.text(32), 16)
                await asyncio.sleep(clients.choose.random() / 2)

    await asyncio.gather(*(about(clients.text(words)) for _ in range(count)))


async def fork(clients: Clients) -> None:
    """Start 43 agents at once over a prefix of 20,000 tokens."""
    prefix = clients.text(20_000)
    await asyncio.gather(*(clients.ask(prefix + clients.text(100), 16) for _ in range(43)))


async def paced(
    clients: Clients, *, count: int, turns: int, start_s: float, pause_s: float
) -> None:
    """Send turns, with pauses, of agents that share a system prompt of 4,000 tokens."""
    system = clients.text(4_000)

    async def agent() -> None:
        prompt = system + clients.text(400)
        await asyncio.sleep(clients.choose.random() * start_s)
        for _ in range(turns):
            prompt += clients.text(300)
            prompt += await clients.ask(prompt, 16)
            await asyncio.sleep(clients.choose.random() * 2 * pause_s)

    await asyncio.gather(*(agent() for _ in range(count)))


LOADS = {
    "sessions": Load(sessions, 300, 8_000),
    "burst": Load(burst, 2_000, 8_000),
    "8k": Load(lambda clients: documents(clients, 16, 8_000), 2_000, 40_000),
    "60k": Load(lambda clients: documents(clients, 6, 60_000), 6_000, 120_000),
    "fork": Load(fork, 4_000, 40_000),
    "ten agents": Load(partial(paced, count=10, turns=1, start_s=2, pause_s=0), 4_000, 8_000),
    "paced": Load(partial(paced, count=40, turns=6, start_s=2, pause_s=2), 4_000, 40_000),
    "kill": Load(lambda clients: sessions(clients, turns=4, response=96), 2_000, 8_000, kills=True),
}


class Figures(msgspec.Struct, frozen=True):
    """Results of one load behind one router; times in seconds.

    ``most_to_mean`` is the most prompt tokens that a server got, divided by the mean.
    """

    cached_share: float
    most_to_mean: float
    ttft_p50_s: float
    ttft_p99_s: float
    requests_per_cpu_s: float
    requests: int
    failed: int
    cut: int
    wrong: int


class Servers:
    """Emulated servers, each a process.

    Attributes:
        model: Reference of the model for Baton.
        context_tokens: Context of each server.
        text_is_known: Whether `Clients` can tell what they generate.
        ready_s: Limit of their start.
    """

    model = DEFAULT_MODEL
    context_tokens = CONTEXT_TOKENS
    text_is_known = True
    ready_s = _READY_S

    def __init__(self, count: int, load: Load, words: Path) -> None:
        self.ports = [FIRST_PORT + number for number in range(count)]
        self._processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "benchmarks.emulated_vllm", str(port), "--events"),
                    *("--model", NAME, "--words", str(words), "--blocks", str(load.blocks)),
                    *("--tokenizer", str(words.with_name("tokenizer.json"))),
                    *("--max-model-len", str(CONTEXT_TOKENS), "--token-s", "0.01"),
                    *("--prefill-tokens-per-s", str(load.prefill_tokens_per_s)),
                ],
                stdout=subprocess.DEVNULL,
            )
            for port in self.ports
        ]

    @property
    def urls(self) -> list[str]:
        """URL of each server."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def kill(self) -> None:
        """Kill the first one."""
        self._processes[0].kill()

    async def until_listening(self, client: httpx.AsyncClient, url: str) -> None:
        """Wait until a server is ready; raise RuntimeError if one has ended, or at the limit."""
        until_s = time.monotonic() + self.ready_s
        while time.monotonic() < until_s and all(one.poll() is None for one in self._processes):
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"{url}/health")).status_code == 200:
                    return
            await asyncio.sleep(0.1)
        raise RuntimeError(f"{url} does not listen{self.log()}")

    def log(self) -> str:
        """Return the end of what the servers wrote, if that is kept."""
        return ""

    async def counts(self, client: httpx.AsyncClient, name: str) -> Counter[str]:
        """Return tokens that each living server counts, by URL: ``queries`` or ``hits``."""
        counts = Counter[str]()
        for url, process in zip(self.urls, self._processes, strict=True):
            if process.poll() is None:
                page = (await client.get(f"{url}/metrics")).text.splitlines()
                line = next(one for one in page if one.startswith(f"vllm:prefix_cache_{name}"))
                counts[url] = int(float(line.split()[-1]))
        return counts

    def stop(self) -> None:
        """End the processes of all servers."""
        for process in self._processes:
            process.kill()
            process.wait()


def command_of(side: str, servers: Servers, port: int) -> list[str]:
    """Return the command that starts a peer."""
    folder = cache_root() / "peers" / "bin"
    shared = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *servers.urls]
    shared += ["--prometheus-port", str(free_port()), "--log-level", "error"]
    if side == "smg":
        return [str(folder / "smg"), "launch", *shared]
    policy = {"round robin": "round_robin", "vllm-router kv": "kv_aware"}.get(side, "cache_aware")
    command = [str(folder / "vllm-router"), *shared, "--policy", policy]
    if policy == "kv_aware":
        for url, server_port in zip(servers.urls, servers.ports, strict=True):
            command += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{server_port + 1000}"]
        command += ["--kv-event-block-size", str(BLOCK_TOKENS), "--kv-event-model", NAME]
    return command


@contextlib.asynccontextmanager
async def router(side: str, servers: Servers, folder: Path) -> AsyncIterator[tuple[str, int]]:
    """Run a router; yield its URL and its process id."""
    if side.startswith("baton"):
        entries = [
            {"url": url, "events": [f"tcp://127.0.0.1:{port + 1000}"] if side == "baton" else []}
            for url, port in zip(servers.urls, servers.ports, strict=True)
        ]
        fleet = Fleet(
            folder, entries, model=servers.model, max_context_tokens=servers.context_tokens
        )
        try:
            url, _ = await fleet.ready(len(entries))
            yield url, fleet.process.pid
        finally:
            fleet.stop()
        return
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    process, log = started(command_of(side, servers, port), folder)
    try:
        if not await is_ready(url, process):
            raise RuntimeError(f"the router did not start: {log()}")
        yield url, process.pid
    finally:
        process.kill()
        process.wait()


def started(
    command: list[str], folder: Path
) -> tuple["subprocess.Popen[bytes]", Callable[[], str]]:
    """Start a process; return it, and a function that returns the end of its log."""
    file = folder / "log"
    with file.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    return process, lambda: file.read_text(errors="replace")[-2000:]


async def is_ready(url: str, process: "subprocess.Popen[bytes]") -> bool:
    """Wait until a router serves a request; return False if it ends or takes too long."""
    body = {"model": NAME, "prompt": " the of and to", "max_tokens": 1}
    until_s = time.monotonic() + _READY_S
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.post(f"{url}/v1/completions", json=body)).status_code == 200:
                    return True
            if process.poll() is not None or time.monotonic() > until_s:
                return False
            await asyncio.sleep(0.1)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its children."""
    parent = psutil.Process(pid)
    times = [one.cpu_times() for one in (parent, *parent.children(recursive=True))]
    return sum(one.user + one.system for one in times)


async def measure(
    side: str,
    load: Load,
    count: int,
    seed: int,
    words: dict[str, int],
    kind: type[Servers] = Servers,
) -> Figures:
    """Measure one load behind one router, with new servers of a kind."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "words.json").write_text(json.dumps(words))
        smollm2().backend.save(str(folder / "tokenizer.json"))
        servers = kind(count, load, folder / "words.json")
        try:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(trust_env=False, timeout=120, limits=limits) as client:
                for number, url in enumerate(servers.urls, start=1):
                    await servers.until_listening(client, url)
                    others = Clients(client, url, words, seed + 1000 * number)  # other texts
                    await _serve_others(client, url, others)
                before = [await servers.counts(client, name) for name in ("queries", "hits")]
                async with router(side, servers, folder) as (url, pid):
                    kill = servers.kill if load.kills else lambda: None
                    await asyncio.sleep(_SETTLE_S)
                    clients = Clients(client, url, words, seed, kill, servers.text_is_known)
                    before_s = cpu_s(pid)
                    await load.send(clients)
                    spent_s = cpu_s(pid) - before_s
                    after = [await servers.counts(client, name) for name in ("queries", "hits")]
        finally:
            servers.stop()
    asked, cached = (
        [counts[url] - earlier[url] for url in counts]
        for counts, earlier in zip(after, before, strict=True)
    )
    return Figures(
        cached_share=sum(cached) / max(sum(asked), 1),
        most_to_mean=max(asked) * len(asked) / max(sum(asked), 1),
        ttft_p50_s=percentile(clients.ttft_s, 0.5),
        ttft_p99_s=percentile(clients.ttft_s, 0.99),
        requests_per_cpu_s=clients.requests / spent_s,
        requests=clients.requests,
        failed=clients.failed,
        cut=clients.cut,
        wrong=clients.wrong,
    )


async def _serve_others(client: httpx.AsyncClient, url: str, others: Clients) -> None:
    """Send a server what it served before it had a router."""
    for _ in range(6):
        body = {"model": NAME, "prompt": others.text(1000), "max_tokens": 1}
        await client.post(f"{url}/v1/completions", json={**body, "cache_salt": STRANGER})


@functools.cache
def smollm2() -> TextTokenizer:
    """Return the tokenizer of all servers."""
    return load_tokenizer(resolve_model(DEFAULT_MODEL).tokenizer)


def token_of_each_word() -> dict[str, int]:
    """Return the words that are one token with the space before them."""
    ids = {word: smollm2().backend.encode(f" {word}").ids for word in VOCABULARY}
    return {word: tokens[0] for word, tokens in ids.items() if len(tokens) == 1}


def install() -> None:
    """Install the peers, once."""
    folder = cache_root() / "peers"
    if not (folder / "bin" / "smg").exists():
        venv.create(folder, with_pip=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *WHEELS], check=True)


async def compare(
    options: argparse.Namespace,
    loads: Mapping[str, Load] = LOADS,
    kind: type[Servers] = Servers,
) -> None:
    """Print the medians of all routers for each load."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers end with this program
    install()
    words = token_of_each_word()
    seen: dict[tuple[str, str], list[Figures]] = defaultdict(list)
    for seed in range(options.rounds):
        for load in options.loads.split(","):
            for side in options.sides.split(","):
                try:
                    figures = await measure(side, loads[load], options.servers, seed, words, kind)
                except RuntimeError as error:
                    print(f"{side}, {load}: not run: {error}", flush=True)
                    continue
                seen[load, side].append(figures)
                print(load, side, msgspec.json.encode(figures).decode(), flush=True)
    for (load, side), rounds in seen.items():
        print(f"| {load} | {side} | {row_of(rounds)} |")


def row_of(rounds: Sequence[Figures]) -> str:
    """Return cells of a table: medians, and sums of failures."""

    def middle(name: str) -> float:
        return float(statistics.median(getattr(figures, name) for figures in rounds))

    lost = ", ".join(
        f"{sum(getattr(one, what) for one in rounds)}" for what in ("failed", "cut", "wrong")
    )
    times = f"{1e3 * middle('ttft_p50_s'):.0f}, {1e3 * middle('ttft_p99_s'):.0f}"
    share = 100 * middle("cached_share")
    cpu = middle("requests_per_cpu_s")
    asked = sum(figures.requests for figures in rounds)
    most = middle("most_to_mean")
    return f"{share:.1f} % | {times} ms | {most:.2f} | {cpu:.0f} | {lost} of {asked}"
