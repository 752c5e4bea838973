"""Added latency of Baton in front of vLLM, request by request on the same vLLM.

    python -m tests.vllm.beside URL [--requests 40]

URL is a running fleet of vLLM workers on this machine, without API keys. Each prompt is sent once
through the router and once to vLLM's own socket, in turn, so that both meet the same load.
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
    """Return one row of the table."""
    first_ms = [1e3 * run[0] for run in runs]
    gaps_ms = [1e3 * (b - a) for run in runs for a, b in itertools.pairwise(run)]
    return (
        f"| {name} | {statistics.median(first_ms):.1f} | {statistics.quantiles(first_ms)[0]:.1f} "
        f"| {statistics.median(gaps_ms):.1f} | {statistics.quantiles(gaps_ms)[0]:.1f} |"
    )


async def compare(url: str, requests: int) -> None:
    """Print the table."""
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as client:
        (worker,) = (await client.get("/fleet")).json()["workers"]
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        arguments = psutil.Process(worker["pid"]).cmdline()
        socket = arguments[arguments.index("--uds") + 1]
        unix = httpx.AsyncHTTPTransport(uds=socket)
        vllm = httpx.AsyncClient(transport=unix, base_url="http://vllm", timeout=300)
        rows: dict[str, list[Arrivals]] = {"vLLM alone": [], "through Baton": []}
        for number in range(-4, requests):
            prompt = random.choices(range(1000, 40_000), k=PROMPT_TOKENS)  # in no cache
            to_vllm, to_baton = bodies(model, prompt)
            own = await arrivals(vllm, protocol.GENERATE, to_vllm)
            ours = await arrivals(client, "/v1/completions", to_baton)
            if number >= 0:  # the first ones warm up
                rows["vLLM alone"].append(own)
                rows["through Baton"].append(ours)
        await vllm.aclose()
    print("| | first token ms, median | lower quartile | gap ms, median | lower quartile |")
    print("|---|---|---|---|---|")
    for name, runs in rows.items():
        print(line(name, runs))


def main() -> None:
    """Run ``python -m tests.vllm.beside``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=40)
    options = parser.parse_args()
    asyncio.run(compare(options.url, options.requests))


if __name__ == "__main__":
    main()
