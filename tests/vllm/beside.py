"""Added latency of Baton in front of vLLM, request by request on the same vLLM.

    python -m tests.vllm.beside URL [--requests 40] [--hand-off] [--key KEY]

URL is a running fleet on this machine, of one vLLM worker, or of prefill and decode workers for
``--hand-off``. KEY is an operator's API key, if the fleet has keys. Each prompt is sent once to the
router and once to vLLM's own sockets, in turn, so that both meet the same load. With ``--hand-off``
the second way is that of vLLM's own example proxy: one token from the first vLLM, then the stream
of the second one.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import httpx
import psutil

from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.vllm import protocol
from baton.types.params import SamplingParams

PROMPT_TOKENS = 64
TOKENS = 32
JSON = {"content-type": "application/json"}
Arrivals = list[float]


async def arrivals(client: httpx.AsyncClient, path: str, body: bytes) -> Arrivals:
    """Return the seconds from the request to each event with tokens."""
    began_s = time.perf_counter()
    found: Arrivals = []
    async with client.stream("POST", path, content=body, headers=JSON) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line.removeprefix("data: "))["choices"]
            if any(choice.get("token_ids") for choice in choices):
                found.append(time.perf_counter() - began_s)
    return found


def bodies(model: str, prompt: list[int]) -> tuple[bytes, bytes]:
    """Return the request to vLLM's token endpoint, and the same to the router."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    spec = RequestSpec(kind=Kind.FULL, params=params, hash_seed=os.urandom(16))
    own = protocol.generate_body("alone", prompt, spec, 0, ())
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return own, json.dumps(body).encode()


def line(name: str, runs: Sequence[Arrivals]) -> str:
    """Return one row of the table: median and lower quartile of each figure."""
    first_ms = [1e3 * run[0] for run in runs]
    second_ms = [1e3 * run[1] for run in runs]
    gaps_ms = [1e3 * (b - a) for run in runs for a, b in itertools.pairwise(run[1:])]
    cells = [
        f"{statistics.median(of):.1f} | {statistics.quantiles(of)[0]:.1f}"
        for of in (first_ms, second_ms, gaps_ms)
    ]
    return f"| {name} | {' | '.join(cells)} |"


def vllm_of(worker: dict[str, Any]) -> httpx.AsyncClient:
    """Return a client of a worker's vLLM, which bypasses Baton."""
    arguments = psutil.Process(worker["pid"]).cmdline()
    unix = httpx.AsyncHTTPTransport(uds=arguments[arguments.index("--uds") + 1])
    return httpx.AsyncClient(transport=unix, base_url="http://vllm", timeout=300)


async def hand_over(
    prefill: httpx.AsyncClient, decode: httpx.AsyncClient, prompt: list[int]
) -> Arrivals:
    """Return the seconds to each event of a response that two vLLMs give without Baton."""
    began_s = time.perf_counter()
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    spec = RequestSpec(kind=Kind.PREFILL, params=params, hash_seed=os.urandom(16))
    first = protocol.prefill_body("alone", prompt, spec, 0, ())
    answer = await prefill.post(protocol.GENERATE, content=first, headers=JSON)
    parameters = answer.json()["kv_transfer_params"]
    body = protocol.generate_body("alone", prompt, spec, 0, (), parameters)
    prefill_s = time.perf_counter() - began_s
    found = await arrivals(decode, protocol.GENERATE, body)
    return [prefill_s + at_s for at_s in found]


async def compare(url: str, requests: int, hand_off: bool, key: str) -> None:
    """Print the table."""
    headers = {"x-baton-mode": "disaggregated"} if hand_off else {}
    if key:
        headers["authorization"] = f"Bearer {key}"
    async with httpx.AsyncClient(
        base_url=url, timeout=300, trust_env=False, headers=headers
    ) as client:
        workers = {one["role"]: one for one in (await client.get("/fleet")).json()["workers"]}
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        vllms = {role: vllm_of(worker) for role, worker in workers.items()}
        rows: dict[str, list[Arrivals]] = {"vLLM alone": [], "through Baton": []}
        for number in range(-4, requests):
            prompt = random.choices(range(1000, 40_000), k=PROMPT_TOKENS)  # in no cache
            to_vllm, to_baton = bodies(model, prompt)
            if hand_off:
                own = await hand_over(vllms["prefill"], vllms["decode"], prompt)
            else:
                own = await arrivals(vllms["decode"], protocol.GENERATE, to_vllm)
            ours = await arrivals(client, "/v1/completions", to_baton)
            if number >= 0:  # the first ones warm up
                rows["vLLM alone"].append(own)
                rows["through Baton"].append(ours)
        for vllm in vllms.values():
            await vllm.aclose()
    figures = ("first token", "second token", "gap behind it")
    print(f"| | {' | '.join(f'{name} ms, median | lower quartile' for name in figures)} |")
    print("|---|---|---|---|---|---|---|")
    for name, runs in rows.items():
        print(line(name, runs))


def main() -> None:
    """Run ``python -m tests.vllm.beside``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--hand-off", action="store_true")
    parser.add_argument("--key", default="")
    options = parser.parse_args()
    asyncio.run(compare(options.url, options.requests, options.hand_off, options.key))


if __name__ == "__main__":
    main()
