"""Attached servers, emulated: start, memory, idle CPU, and the cached share.

    python -m benchmarks.attached idle [--servers 10] [--seconds 30]
    python -m benchmarks.attached cached [--servers 4] [--sessions 24] [--turns 8]
    python -m benchmarks.attached peers           see benchmarks/peers.py

``cached`` sends one load of sessions with growing prompts to a fleet that reads KV events and to
one that does not. The servers hold less than all sessions. ``--strangers`` is the share of prompts
that other clients send to the servers, of which a fleet without events does not know. The share is
counted by the servers.
"""

import argparse
import asyncio
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx

from benchmarks.emulated_vllm import STRANGER, EmulatedServer, Emulation
from benchmarks.peers import LOADS, NAME, SIDES, Fleet, compare

TURN_TOKENS = 320
RESPONSE_TOKENS = 24


def emulation(options: argparse.Namespace, events_port: int) -> Emulation:
    """Return a server that holds its part of the load, but not all of it."""
    return Emulation(
        model=NAME,
        blocks=options.blocks,
        max_model_len=32_768,
        events_port=events_port,
        prefill_tokens_per_s=options.rate,
        token_s=0.002,
    )


async def started(
    options: argparse.Namespace, *, events: bool
) -> tuple[list[EmulatedServer], list[dict[str, object]]]:
    """Return listening servers, and their entries in the fleet file."""
    servers: list[EmulatedServer] = []
    entries: list[dict[str, object]] = []
    for number in range(options.servers):
        port = 20_570 + number if events else 0
        servers.append(EmulatedServer(emulation(options, port)))
        url = await servers[-1].start()
        entries.append({"url": url, "events": [f"tcp://127.0.0.1:{port}"] if events else []})
    return servers, entries


async def idle(options: argparse.Namespace) -> None:
    """Measure the start, the memory and the idle CPU."""
    servers, entries = await started(options, events=options.events)
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), entries)
        try:
            _, seconds = await fleet.ready(options.servers)
            process = fleet.attached()
            await asyncio.sleep(5)
            before = process.cpu_times()
            await asyncio.sleep(options.seconds)
            after = process.cpu_times()
            used_s = after.user + after.system - before.user - before.system
            rss_mib = process.memory_info().rss / 2**20
            print(f"{options.servers} servers: ready after {seconds:.2f} s, {rss_mib:.0f} MiB, ")
            print(f"idle {100 * used_s / options.seconds:.2f} % of a core")
        finally:
            fleet.stop()
    for server in servers:
        await server.stop()


async def cached(options: argparse.Namespace) -> None:
    """Compare the cached share with and without KV events."""
    for events in (True, False):
        servers, entries = await started(options, events=events)
        with tempfile.TemporaryDirectory() as folder:
            fleet = Fleet(Path(folder), entries)
            try:
                url, _ = await fleet.ready(options.servers)
                urls = [str(entry["url"]) for entry in entries]
                await send_sessions(options, url, urls)
                prompts = sum(server.vllm.prompts for server in servers)
                share = sum(server.vllm.cached for server in servers) / prompts
                kind = "with KV events" if events else "without KV events"
                print(f"{kind}: {100 * share:.1f} % of prompt tokens cached", flush=True)
            finally:
                fleet.stop()
        for server in servers:
            await server.stop()


async def send_sessions(options: argparse.Namespace, url: str, servers: Sequence[str]) -> None:
    """Send turns of all sessions, and prompts of strangers."""
    choose = random.Random(1)
    prompts: list[list[int]] = [[] for _ in range(options.sessions)]
    gate = asyncio.Semaphore(options.clients)
    async with httpx.AsyncClient(trust_env=False, timeout=120) as client:

        async def turn(prompt: list[int]) -> None:
            prompt += [choose.randrange(1000, 40_000) for _ in range(TURN_TOKENS)]
            body = {"model": NAME, "prompt": prompt, "max_tokens": RESPONSE_TOKENS}
            body |= {"ignore_eos": True, "temperature": 0, "return_token_ids": True}
            async with gate:
                answer = (await client.post(f"{url}/v1/completions", json=body)).json()
                prompt += answer["choices"][0]["token_ids"]
                if choose.random() < options.strangers:
                    await stranger(choose, client, choose.choice(servers))

        for _ in range(options.turns):
            order = list(prompts)
            choose.shuffle(order)
            await asyncio.gather(*map(turn, order))


async def stranger(choose: random.Random, client: httpx.AsyncClient, url: str) -> None:
    """Send a prompt past Baton."""
    tokens = [choose.randrange(1000, 40_000) for _ in range(4 * TURN_TOKENS)]
    body = {"token_ids": tokens, "sampling_params": {"max_tokens": 2}, "cache_salt": STRANGER}
    await client.post(f"{url}/inference/v1/generate", json=body)


def main() -> None:
    """Run ``python -m benchmarks.attached``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("idle", "cached", "peers"))
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--events", action="store_true", help="idle: servers send KV events")
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument(
        "--blocks", type=int, default=400, help="number of 32-token blocks of each server"
    )
    parser.add_argument("--rate", type=float, default=8000.0, help="prompt tokens per second")
    parser.add_argument("--strangers", type=float, default=0.0)
    parser.add_argument("--sides", default=SIDES, help="peers: routers")
    parser.add_argument("--loads", default=",".join(LOADS), help="peers: loads")
    parser.add_argument("--rounds", type=int, default=3, help="peers: rounds of all")
    options = parser.parse_args()
    asyncio.run({"idle": idle, "cached": cached, "peers": compare}[options.what](options))


if __name__ == "__main__":
    main()
