"""Latency of clients' requests with and without a shadow that runs copies of them.

    python -m benchmarks.lanes.shadow [--rounds 6] [--seconds 12] [--rate 8] [--share 100]

An emulated fleet (``h100-70b``) serves two versions of a model, with one worker each. Blocks with
and without the shadow take turns, in alternating order. Both blocks of a round have the same
arrivals and lengths, and prompts of their own, so that neither finds the other's in the cache.
"""

import asyncio
import os
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from baton.config.fleet_file import DEFAULT_MODEL
from loadtest.client.processes import run_clients
from loadtest.client.records import RequestRecord, ServerOptions
from loadtest.lab.places import fleet_of
from loadtest.lab.table import LabContext
from loadtest.metrics.request_figures import e2e_s, itl_longest_s, ttft_s
from loadtest.workloads.lengths import parse_lengths
from loadtest.workloads.synthetic import OpenLoop, open_loop_plan

_SETTLE_S = 2.0
_FLEET = f"""fleet: shadow
models:
  chat@1: {{model: {DEFAULT_MODEL}}}
  chat@2: {{model: {DEFAULT_MODEL}}}
pools: {{prefill: 0, decode: 1, engine: {{emulated: h100-70b}}}}
kv_blocks_per_worker: 4096
cpus_per_rank: 0.05
"""
_TOKEN = secrets.token_hex(16)
_FIGURES: dict[str, Callable[[RequestRecord], float | None]] = {
    "TTFT": ttft_s,
    "longest gap": itl_longest_s,
    "whole response": e2e_s,
}


def quantiles(records: Sequence[RequestRecord]) -> dict[str, tuple[float, float]]:
    """Return the median and the p99 of each latency in seconds.

    Raises:
        RuntimeError: A request failed.
    """
    if bad := [one for one in records if one.end != "ok"]:
        raise RuntimeError(f"a request failed: {bad[0].end} {bad[0].detail}")
    found: dict[str, tuple[float, float]] = {}
    for name, figure in _FIGURES.items():
        values = [value for one in records if (value := figure(one)) is not None]
        median, p99 = np.quantile(values, (0.5, 0.99))
        found[name] = float(median), float(p99)
    return found


def measure(
    url: str, rounds: int, seconds: float, rate: float, share: float
) -> dict[bool, list[list[RequestRecord]]]:
    """Return the records of all blocks, by whether the shadow ran.

    A shadow that its gate ends within a block is reported, since the rest had no copies.
    """
    found: dict[bool, list[list[RequestRecord]]] = {False: [], True: []}
    for turn in range(rounds):
        for on in (False, True) if turn % 2 == 0 else (True, False):
            body = {"verb": "alias", "name": "chat", "model": "chat@1"}
            if on:
                body |= {"verb": "shadow", "model": "chat@2", "share": share}  # type: ignore[dict-item]
            _post(url, body)
            time.sleep(_SETTLE_S)
            found[on].append(asyncio.run(_block(url, seconds, rate, turn, on)))
            if on and (reason := _ended(url)):
                typer.echo(f"round {turn}: the gate ended the shadow: {reason}")
    return found


async def _block(
    url: str, seconds: float, rate: float, turn: int, shadowed: bool
) -> list[RequestRecord]:
    load = OpenLoop(
        requests=round(seconds * rate),
        rate=rate,
        prompt_tokens=parse_lengths("uniform:256-768"),
        answer_tokens=parse_lengths("uniform:16-48"),
    )
    records: list[RequestRecord] = []
    options = ServerOptions(url=url, model="chat")
    plan = msgspec.structs.replace(
        open_loop_plan(load, name="shadow", seed=turn), seed=2 * turn + shadowed
    )  # the plan's seed makes the words
    await run_clients(plan, options, clients=1, record=records.append)
    return records


def copies(url: str) -> dict[str, float]:
    """Return the number of copies by result."""
    page = httpx.get(f"{url}/metrics", trust_env=False).text
    lines = (line for line in page.splitlines() if line.startswith("baton_shadow_requests_total{"))
    return {
        line.partition('result="')[2].partition('"')[0]: float(line.rpartition(" ")[2])
        for line in lines
    }


def _ended(url: str) -> str:
    answer = httpx.get(f"{url}/fleet/models", trust_env=False).raise_for_status()
    entry = answer.json()["routes"]["chat"]
    return "" if entry["shadow_share"] else str(entry["reason"])


def _post(url: str, body: dict[str, Any]) -> None:
    headers = {"authorization": f"Bearer {_TOKEN}"}
    answer = httpx.post(
        f"{url}/fleet/models", json=body, headers=headers, trust_env=False, timeout=60
    )
    answer.raise_for_status()


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of blocks.")] = 6,
    seconds: Annotated[float, typer.Option(help="Length of a block.")] = 12.0,
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 8.0,
    share: Annotated[float, typer.Option(help="Share of the conversations in percent.")] = 100.0,
) -> None:
    """Compare latencies with and without a shadow."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.yaml"
        file.write_text(_FLEET)
        os.environ["BATON_FLEET_TOKEN"] = _TOKEN
        with fleet_of("", file, None, LabContext()) as place:
            found = measure(place.url, rounds, seconds, rate, share / 100)
            counted = copies(place.url)
    table = Table("latency", "without, p50 / p99 ms", "with", "p99 ratio", "by round")
    blocks = {on: [quantiles(one) for one in found[on]] for on in found}
    whole = {on: quantiles([one for block in found[on] for one in block]) for on in found}
    for name in _FIGURES:
        ratios = [
            after[name][1] / before[name][1]
            for before, after in zip(blocks[False], blocks[True], strict=True)
        ]
        table.add_row(
            name,
            *(" / ".join(f"{1e3 * value:.1f}" for value in whole[on][name]) for on in whole),
            f"{whole[True][name][1] / whole[False][name][1]:.3f}",
            f"median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}",
        )
    Console(soft_wrap=True).print(table)
    Console().print(f"copies: {counted}; requests: {len(found[True]) * len(found[True][0])}")


if __name__ == "__main__":
    typer.run(main)
