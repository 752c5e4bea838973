"""Usage and cost of a fleet of real processes with emulated engines."""

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from baton.engine.settings import EmulatedModel
from tests.e2e.fleet_processes import NAME, Fleet, samples, total

PRICE = 3.6
EMULATED = EmulatedModel(
    timing="epyc-135m", vocab_size=49152, eos_token_ids=(2,), max_context_tokens=4096
)
ALSO = f"pools: {{engine: emulated, prefill: 1, decode: 2, auto: {{price_per_hour: {PRICE}}}}}"
WORKERS = ("prefill-0", "decode-0", "decode-1")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    running = Fleet(tmp_path)
    try:
        yield running.start(*WORKERS, queued=100, also=ALSO, emulated=EMULATED)
    finally:
        running.stop()


class Load:
    """Clients of several routers, and what the answers said, with the time of their end."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, str, int, int]] = []

    async def run(self, urls: list[str], count: int) -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            places = asyncio.Semaphore(8)

            async def one(number: int) -> None:
                url = urls[number % len(urls)]
                body = {
                    "model": NAME,
                    "prompt": f"{number} " * (1 + number % 40),
                    "max_tokens": 1 + number % 12,
                    "n": 1 + number % 2,
                }
                tenant = ("team", "free")[number % 3 == 0]
                async with places:
                    answer = await client.post(
                        f"{url}/v1/completions", json=body, headers={"x-baton-tenant": tenant}
                    )
                assert answer.status_code == 200, answer.text
                usage = answer.json()["usage"]
                tokens = usage["prompt_tokens"], usage["completion_tokens"]
                self.ends.append((time.monotonic(), url, *tokens))

            found = await asyncio.gather(*map(one, range(count)), return_exceptions=True)
            assert all(fault is None or isinstance(fault, httpx.TransportError) for fault in found)

    def sums(self) -> tuple[int, int, int]:
        answers = [end[2:] for end in self.ends]
        return len(answers), sum(a[0] for a in answers), sum(a[1] for a in answers)


def usage_of(url: str) -> dict:
    return httpx.get(f"{url}/fleet/usage", params={"by": "hour,tenant,key,model"}).json()


def counted(url: str) -> tuple[int, int, int]:
    lines = usage_of(url)["lines"]
    fields = ("requests", "input_tokens", "output_tokens")
    requests, prompt, output = (sum(line[field] for line in lines) for field in fields)
    return requests, prompt, output


def charged_s(url: str) -> float:
    lines = usage_of(url)["lines"]
    return sum(line["worker_s"] for line in lines if line["tenant"] != "(idle)")


def worked_s(fleet: Fleet) -> float:
    """Time of all steps, by the metrics of the workers."""
    pages = [f"http://{worker.record.metrics_address}" for worker in fleet.workers.values()]
    return sum(total(samples(page), "baton_step_seconds_sum") for page in pages)


async def until_equal(one, other, within: float, timeout_s: float = 5.0) -> None:
    limit_s = time.monotonic() + timeout_s
    while abs(one() - other()) > within * other():
        assert time.monotonic() < limit_s, (one(), other())
        await asyncio.sleep(0.2)


@pytest.mark.slow
async def test_costs_add_up_to_the_workers_and_a_killed_router_loses_a_second(
    fleet: Fleet,
) -> None:
    began_s = time.monotonic()
    first = fleet.url
    second = fleet.start_router()
    probes_s = worked_s(fleet)
    load = Load()
    await load.run([first, second], 80)
    await asyncio.sleep(1.5)
    assert counted(first) == load.sums()
    # Probes of routers belong to no tenant.
    await until_equal(lambda: charged_s(first) + probes_s, lambda: worked_s(fleet), within=0.03)
    assert charged_s(first) < worked_s(fleet)

    calls = asyncio.create_task(load.run([first, second], 160))
    await asyncio.sleep(2.5)
    killed_s = time.monotonic()
    fleet.routers[1][0].send_signal(signal.SIGKILL)
    await calls
    await asyncio.sleep(1.5)
    safe = Load()
    safe.ends = [end for end in load.ends if end[1] == first or end[0] < killed_s - 1.2]
    assert len(safe.ends) < len(load.ends), "some calls ended in the last second"
    for least, found, most in zip(safe.sums(), counted(first), load.sums(), strict=True):
        assert least <= found <= most

    for worker in fleet.workers.values():
        worker.process.terminate()
        worker.process.wait(10)
    alive_s = (time.monotonic() - began_s) * len(WORKERS)
    found = usage_of(first)
    worker_s = sum(found["worker_seconds"].values())
    assert set(found["worker_seconds"]) == {"prefill", "decode"}
    assert worker_s == pytest.approx(alive_s, rel=0.5)
    cost = sum(line["cost"] for line in found["lines"])
    assert cost == pytest.approx(worker_s * PRICE / 3600, rel=0.001)
    assert 0 < sum(line["cost"] for line in found["lines"] if line["tenant"] == "team") < cost
