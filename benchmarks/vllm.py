"""vLLM workers beside plain vLLM, on this machine's CPU; `make test-vllm` makes the environment.

    python -m benchmarks.vllm [--only latency,throughput,hand-off,sessions] [--own]

- ``latency``: one request at a time, to vLLM's ``/v1/completions``, which its users have without
  Baton, to its endpoint for token ids, which Baton uses, and through the router, in random order
- ``hand-off``: the same with a prefill and a decode worker; without Baton one token comes from the
  first vLLM and the stream from the second one, as with vLLM's own example proxy
- ``throughput``: 1 and 16 clients that each keep a request running, in turn likewise; ``--own``
  adds a fleet with Baton's engine
- ``sessions``: conversations on four vLLMs, through Baton and round robin to the same processes,
  each time with empty caches; counts the prompt tokens that were cached

All requests have token ids, so that every side computes the same prompts.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import psutil
import typer

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.vllm import protocol
from baton.types.params import SamplingParams
from benchmarks.layouts import bench_fleet
from loadtest.percent import percent
from tests.vllm.places import MODEL, PYTHON

START_LIMIT_S = 600.0
VOCABULARY = range(1000, 40_000)
CLIENTS = (1, 16)

_HEADERS = {"content-type": "application/json"}
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Response to one request.

    Attributes:
        arrivals_s: Times of the events with tokens, from the request on.
    """

    arrivals_s: list[float]
    tokens: list[int]
    cached_tokens: int = 0


class Completions:
    """Requests to ``/v1/completions``, of the router or of a vLLM."""

    def __init__(
        self, name: str, client: httpx.AsyncClient, model: str, mode: str = "auto"
    ) -> None:
        self.name = name
        self._client = client
        self._model = model
        self._headers = {**_HEADERS, "x-baton-mode": mode}

    async def ask(self, prompt: list[int], max_tokens: int) -> Answer:
        """Send a prompt of token ids; greedy, without a stop."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body |= {"stream_options": {"include_usage": True}}
        return await _streamed(
            self._client, "/v1/completions", json.dumps(body).encode(), self._headers
        )


class ToVllm:
    """Requests to the socket of a vLLM: its endpoint for token ids, as Baton uses it."""

    name = "vLLM alone"

    def __init__(self, client: httpx.AsyncClient, role: str) -> None:
        self.client = client
        self.role = role

    async def ask(self, prompt: list[int], max_tokens: int) -> Answer:
        """Send a prompt of token ids; greedy, without a stop."""
        spec = _spec(Kind.FULL, max_tokens)
        body = protocol.generate_body(os.urandom(8).hex(), prompt, spec, 0, ())
        return await _streamed(self.client, protocol.GENERATE, body)

    async def empty_cache(self) -> None:
        """Forget all cached prefixes."""
        (await self.client.post("/reset_prefix_cache")).raise_for_status()


class TwoVllms:
    """Requests to two vLLMs that hand KV over without Baton."""

    name = "two vLLMs alone"

    def __init__(self, prefill: ToVllm, decode: ToVllm) -> None:
        self._prefill = prefill
        self._decode = decode

    async def ask(self, prompt: list[int], max_tokens: int) -> Answer:
        """Send a prompt of token ids; greedy, without a stop. No token comes before the load."""
        began_s = time.perf_counter()
        name = os.urandom(8).hex()
        hold = {"do_remote_decode": True}
        spec = _spec(Kind.PREFILL, max_tokens)
        body = protocol.prefill_body(name, prompt, spec, 0, (), hold)
        answer = await self._prefill.client.post(protocol.GENERATE, content=body, headers=_HEADERS)
        parameters = answer.raise_for_status().json()["kv_transfer_params"]
        body = protocol.generate_body(name, prompt, _spec(Kind.FULL, max_tokens), 0, (), parameters)
        prefill_s = time.perf_counter() - began_s
        rest = await _streamed(self._decode.client, protocol.GENERATE, body)
        arrivals_s = [prefill_s + at_s for at_s in rest.arrivals_s]
        return Answer(arrivals_s=arrivals_s, tokens=rest.tokens)


Side = Completions | ToVllm | TwoVllms


def _spec(kind: Kind, max_tokens: int) -> RequestSpec:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return RequestSpec(kind=kind, params=params, hash_seed=bytes(16))


async def _streamed(
    client: httpx.AsyncClient, path: str, body: bytes, headers: Mapping[str, str] = _HEADERS
) -> Answer:
    began_s = time.perf_counter()
    arrivals: list[float] = []
    tokens: list[int] = []
    cached = 0
    async with client.stream("POST", path, content=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if usage := event.get("usage"):
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            new = [token for one in event["choices"] for token in one.get("token_ids") or ()]
            if new:
                arrivals.append(time.perf_counter() - began_s)
                tokens += new
    if not tokens:
        raise RuntimeError(f"{path} answered without tokens")
    return Answer(arrivals_s=arrivals, tokens=tokens, cached_tokens=cached)


@contextlib.contextmanager
def vllm_fleet(workers: int, kv_mib: int, *, pair: bool = False) -> Iterator[str]:
    """Start a fleet of vLLM workers with one thread each; yield its URL.

    ``pair`` is a prefill and a decode worker in place of ``workers``.
    """
    args = ["--dtype", "bfloat16", "--block-size", "32", "--enforce-eager"]
    args += ["--kv-cache-memory-bytes", str(kv_mib * _MIB)]
    settings = (
        f"numerics: fast\npools:\n  prefill: {int(pair)}\n  decode: {1 if pair else workers}\n"
        f"  engine: vllm\n  vllm: {{python: {PYTHON}, args: {json.dumps(args)}"
        f"{', hand_off: nixl' if pair else ''}}}\n"
    )
    with (
        TemporaryDirectory() as folder,
        bench_fleet(
            Path(folder) / "vllm",
            settings,
            model=str(MODEL),
            context=2048,
            start_limit_s=START_LIMIT_S,
        ) as url,
    ):
        yield url


async def _all_ready(router: httpx.AsyncClient) -> list[dict[str, Any]]:
    """Wait until every worker is ready; the fleet is ready with the first one."""
    until_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until_s:
        workers: list[dict[str, Any]] = (await router.get("/fleet")).json()["workers"]
        if all(worker["state"] == "ready" for worker in workers):
            return workers
        await asyncio.sleep(1)
    raise RuntimeError("not all workers are ready")


async def _model_of(client: httpx.AsyncClient) -> str:
    name: str = (await client.get("/v1/models")).json()["data"][0]["id"]
    return name


@contextlib.asynccontextmanager
async def sides(url: str, mode: str = "auto") -> AsyncIterator[tuple[Completions, list[ToVllm]]]:
    """Connect to the router, with this ``x-baton-mode``, and to every vLLM behind it."""
    async with contextlib.AsyncExitStack() as stack:
        router = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, timeout=600, trust_env=False)
        )
        model = await _model_of(router)
        own = []
        for worker in await _all_ready(router):
            line = psutil.Process(worker["pid"]).cmdline()
            if "--uds" in line:
                unix = httpx.AsyncHTTPTransport(uds=line[line.index("--uds") + 1])
                client = httpx.AsyncClient(transport=unix, base_url="http://vllm", timeout=600)
                own.append(ToVllm(await stack.enter_async_context(client), worker["role"]))
        yield Completions("through Baton", router, model, mode), own


def _prompt(random_: random.Random, tokens: int) -> list[int]:
    return random_.choices(VOCABULARY, k=tokens)


async def latency(url: str, requests: int, prompt_tokens: int) -> None:
    """Print latencies of single requests through Baton and to the vLLM behind it."""
    async with sides(url) as (baton, own):
        vllm = own[0]
        api = Completions("vLLM's /v1/completions", vllm.client, await _model_of(vllm.client))
        await _in_turn([api, vllm, baton], requests, prompt_tokens)


async def hand_off(url: str, requests: int, prompt_tokens: int) -> None:
    """Print latencies of single requests that are handed over, with and without Baton."""
    async with sides(url, "disaggregated") as (baton, own):
        by_role = {vllm.role: vllm for vllm in own}
        alone = TwoVllms(by_role["prefill"], by_role["decode"])
        await _in_turn([alone, baton], requests, prompt_tokens)


async def _in_turn(compared: Sequence[Side], requests: int, prompt_tokens: int) -> None:
    """Print first tokens, second tokens and gaps of requests with 32 tokens of response.

    All sides are asked once in each round, in random order. Single requests differ by more than
    the sides do, so the median of each round's difference is more exact than that of medians.
    """
    random_ = random.Random(1)
    rounds: list[dict[str, Answer]] = []
    for _ in range(4 + requests):
        order = random_.sample(compared, len(compared))
        prompts = [_prompt(random_, prompt_tokens) for _ in order]  # in no cache
        asked = zip(order, prompts, strict=True)
        rounds.append({side.name: await side.ask(prompt, 32) for side, prompt in asked})
    base = compared[0].name
    print("| one at a time | first token ms, median | lower quartile ", end="")
    print(f"| more than {base}, median of rounds | second token, median | gap, median |")
    print("|---|---|---|---|---|---|")
    for name in (side.name for side in compared):
        answers = [one[name] for one in rounds[4:]]  # the first ones warm up
        first_ms = [1e3 * one.arrivals_s[0] for one in answers]
        second_ms = [1e3 * one.arrivals_s[1] for one in answers]
        more_ms = [1e3 * (one[name].arrivals_s[0] - one[base].arrivals_s[0]) for one in rounds[4:]]
        gaps_ms = [
            1e3 * (b - a) for one in answers for a, b in itertools.pairwise(one.arrivals_s[1:])
        ]
        print(
            f"| {name} | {statistics.median(first_ms):.1f} | "
            f"{statistics.quantiles(first_ms)[0]:.1f} | {statistics.median(more_ms):.1f} | "
            f"{statistics.median(second_ms):.1f} | {statistics.median(gaps_ms):.2f} |"
        )


async def _rate(side: Side, clients: int, seconds: float, seed: int) -> tuple[float, float]:
    """Return requests and tokens per second of clients that each keep a request running."""
    random_ = random.Random(seed)
    began_s = time.perf_counter()
    ended = tokens = 0

    async def client() -> None:
        nonlocal ended, tokens
        while time.perf_counter() < began_s + seconds:
            answer = await side.ask(_prompt(random_, 64), 64)
            ended += 1
            tokens += len(answer.tokens)

    await asyncio.gather(*(client() for _ in range(clients)))
    lasted_s = time.perf_counter() - began_s
    return ended / lasted_s, tokens / lasted_s


async def throughput(url: str, seconds: float, rounds: int, *, alone: bool) -> None:
    """Print requests per second of 64 + 64 tokens; ``alone``: beside vLLM's own socket."""
    async with sides(url) as (baton, own):
        compared: list[Side] = [own[0], baton] if alone else [baton]
        for clients in CLIENTS:
            rates: dict[str, list[tuple[float, float]]] = {side.name: [] for side in compared}
            for round_ in range(rounds):
                for side in compared if round_ % 2 else reversed(compared):
                    seed = hash((clients, round_, side.name))
                    rates[side.name].append(await _rate(side, clients, seconds, seed))
            for name, found in rates.items():
                what = name if alone else "Baton's own engine"
                requests, tokens = (statistics.median(one) for one in zip(*found, strict=True))
                print(f"| {what}, {clients} clients | {requests:.2f} | {tokens:.0f} |")


async def _converse(
    choose: Sequence[Side], sessions: int, turns: int
) -> tuple[int, int, list[float]]:
    """Run conversations; return the tokens of all prompts, those cached, and times to first token.

    Request number N of the whole run goes to ``choose[N % len(choose)]``. Sessions share their
    first 256 tokens. Turns of one session follow each other after one to three seconds.
    """
    counter = itertools.count()
    shared = _prompt(random.Random(2), 256)
    total = cached = 0
    first_s: list[float] = []

    async def session(number: int) -> None:
        nonlocal total, cached
        random_ = random.Random(number)
        prompt = shared + _prompt(random_, 200)
        await asyncio.sleep(random_.uniform(0, 10))
        for _ in range(turns):
            answer = await choose[next(counter) % len(choose)].ask(prompt, 16)
            total += len(prompt)
            cached += answer.cached_tokens
            first_s.append(answer.arrivals_s[0])
            prompt = prompt + answer.tokens + _prompt(random_, 80)
            await asyncio.sleep(random_.uniform(1, 3))

    await asyncio.gather(*(session(number) for number in range(sessions)))
    return total, cached, first_s


async def sessions(url: str, count: int, turns: int) -> None:
    """Print the share of cached prompt tokens of conversations on four vLLMs."""
    async with sides(url) as (baton, own):
        print("| sessions | cached | first token s, p50 | p90 |")
        print("|---|---|---|---|")
        ways: dict[str, Sequence[Side]] = {"round robin": own, "through Baton": [baton]}
        for name, choose in ways.items():
            for vllm in own:
                await vllm.empty_cache()
            await asyncio.sleep(2)
            total, cached, first_s = await _converse(choose, count, turns)
            p50, p90 = statistics.median(first_s), statistics.quantiles(first_s, n=10)[8]
            print(f"| {name} | {percent(cached / total)} of {total} | {p50:.2f} | {p90:.2f} |")


def main(
    only: Annotated[
        str, typer.Option(help="Parts to run.")
    ] = "latency,throughput,hand-off,sessions",
    own: Annotated[bool, typer.Option("--own", help="Also Baton's own engine.")] = False,
    requests: Annotated[int, typer.Option(help="Requests of `latency` and `hand-off`.")] = 60,
    prompt_tokens: Annotated[int, typer.Option(help="Length of their prompts.")] = 64,
    seconds: Annotated[float, typer.Option(help="Time of one run of `throughput`.")] = 15.0,
    rounds: Annotated[int, typer.Option(help="Runs of `throughput` per side.")] = 3,
    conversations: Annotated[int, typer.Option(help="Conversations of `sessions`.")] = 24,
    turns: Annotated[int, typer.Option(help="Turns of a conversation.")] = 6,
) -> None:
    """Measure vLLM workers beside plain vLLM; needs a quiet machine but for `sessions`."""
    parts = only.split(",")
    if "latency" in parts or "throughput" in parts:
        with vllm_fleet(1, 512) as url:
            if "latency" in parts:
                asyncio.run(latency(url, requests, prompt_tokens))
            if "throughput" in parts:
                print("| 64 + 64 tokens | requests/s | tokens/s |\n|---|---|---|")
                asyncio.run(throughput(url, seconds, rounds, alone=True))
    if "hand-off" in parts:
        with vllm_fleet(2, 512, pair=True) as url:
            asyncio.run(hand_off(url, requests, prompt_tokens))
    if own:
        settings = "numerics: fast\npools: {prefill: 0, decode: 1}\n"
        with TemporaryDirectory() as folder, bench_fleet(Path(folder) / "own", settings) as url:
            asyncio.run(throughput(url, seconds, rounds, alone=False))
    if "sessions" in parts:
        with vllm_fleet(4, 96) as url:
            asyncio.run(sessions(url, conversations, turns))


if __name__ == "__main__":
    typer.run(main)
