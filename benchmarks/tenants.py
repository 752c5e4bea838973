"""Cost of keys, limits and `slo` at a router, and the time until a revoked key is refused.

    python -m benchmarks.tenants [--rounds 3] [--seconds 8]

Routers without, with keys and limits, and with the gate of `slo` take turns under the load of
``benchmarks.router``. The parts of a call are measured in this process. All costs are CPU time, so
other work on the machine matters less.
"""

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import httpx
import typer

from baton.tenants.key_record import issue, new_key
from baton.tenants.limits import Limits
from baton.tenants.usage.ledger import Ledger, RowName
from benchmarks.router.__main__ import Demand, Shape, Side, baton, measure
from benchmarks.router.processes import TOKEN, redis, router, workers
from router.frontend.rate_limits import openai_headers
from router.tenants.key_table import KeyTable
from router.tenants.quota import EXCHANGE_NS, Quotas, Taken

_TREE = Path(__file__).parents[1]
_WORKERS = 4
_STEP_S = 0.006
_KEYS = {"clients": {"api_keys_file": "redis"}}
_SLO = {"slo": {"ttft_s": 10.0, "itl_s": 1.0}}
_OPERATOR = {"authorization": f"Bearer {TOKEN}"}
_SHAPE = Shape(20, 16)
_TIMES = 100_000


def cpu_us(call: Callable[[], object], times: int = _TIMES) -> float:
    """Return the CPU time of a call in microseconds, as the least mean of five."""
    means = []
    gc.disable()
    for _ in range(5):
        began_s = time.process_time()
        for _ in range(times // 5):
            call()
        means.append((time.process_time() - began_s) / (times // 5))
    gc.enable()
    return 1e6 * min(means)


def parts() -> dict[str, float]:
    """Return the CPU time of each part of a call in microseconds."""
    table = KeyTable()
    keys = [new_key() for _ in range(10_000)]
    for number, key in enumerate(keys):
        table.adopt(issue(key, {"tenant": f"team-{number}"}))
    found = {"key of 10,000": cpu_us(lambda: table.find(keys[7_000]))}
    few = KeyTable()
    few.adopt(issue(keys[0], {"tenant": "team"}))
    found["key of 1"] = cpu_us(lambda: few.find(keys[0]))

    quotas = Quotas("router")
    limits = Limits(rpm=10**9, tpm=10**12, tpd=10**13, concurrent=10**6)
    quotas.set_limits({"team": limits})
    now_ns = EXCHANGE_NS
    quotas.leave_redis(1)
    quotas.exchange_here(now_ns)

    def limited() -> None:
        taken = quotas.take("team", 100, 1, 64, now_ns)
        if not isinstance(taken, Taken):
            raise TypeError(f"the lease is used up: {taken}")
        quotas.settle(taken.reservation, 100, 60, now_ns)
        openai_headers(quotas.standing("team", now_ns))

    found["four limits and their headers"] = cpu_us(limited)
    ledger = Ledger("router")

    def used() -> None:
        row = ledger.row(RowName(500_000, "team", "key", "model"))
        row.requests += 1
        row.input_tokens += 100
        row.output_tokens += 60

    found["usage"] = cpu_us(used)
    return found


def give_key(port: int, tenant: str = "team") -> str:
    """Issue a key of a tenant with limits that its calls do not reach."""
    key = new_key()
    record = issue(key, {"tenant": tenant})
    sent = {"id": record.id, "sha256": record.sha256, "rights": record.rights}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=_OPERATOR) as http:
        http.post("/fleet/keys", json={"keys": [sent]}).raise_for_status()
        limits = {"rpm": 10**7, "tpm": 10**9, "tpd": 10**12, "concurrent": 10_000}
        http.put(f"/fleet/tenants/{tenant}", json=limits).raise_for_status()
    return key


def revocations(port: int, other: int, times: int) -> list[float]:
    """Return the seconds from each revocation at a router until another one refuses the key."""
    found = []
    with httpx.Client(headers=_OPERATOR) as http:
        for _ in range(times):
            key = give_key(port)
            time.sleep(1)
            began_s = time.monotonic()
            http.delete(f"http://127.0.0.1:{port}/fleet/keys/{key[3:15]}").raise_for_status()
            while (
                httpx.get(
                    f"http://127.0.0.1:{other}/v1/models", headers={"x-api-key": key}
                ).status_code
                == 200
            ):
                time.sleep(0.005)
            found.append(time.monotonic() - began_s)
    return found


def main(
    rounds: Annotated[int, typer.Option(help="Rounds in turns; medians are shown.")] = 3,
    seconds: Annotated[float, typer.Option(help="Measured time of each load.")] = 8.0,
    times: Annotated[int, typer.Option(help="Number of revocations.")] = 10,
) -> None:
    """Measure keys, limits and `slo`, and print the figures."""
    for name, us in parts().items():
        typer.echo(f"{name}: {us:.2f} us of CPU time")
    costs: dict[str, list[float]] = {"neither": [], "keys and limits": [], "slo": []}
    demand = Demand(clients=32)
    with (
        baton(_TREE, _WORKERS, _STEP_S, routers=1) as plain,
        redis() as url,
        workers(url, _WORKERS, _STEP_S) as workers_pid,
        router(_TREE, url, _WORKERS, _KEYS) as (pids, port),
        router(_TREE, url, _WORKERS, _KEYS) as (_, other),
        redis() as gated_url,
        workers(gated_url, _WORKERS, _STEP_S) as gated_workers_pid,
        router(_TREE, gated_url, _WORKERS, _SLO) as (gated_pids, gated_port),
    ):
        limited = Side(port, pids, workers_pid, give_key(port))
        gated = Side(gated_port, gated_pids, gated_workers_pid)
        sides = dict(zip(costs, (plain, limited, gated), strict=True))
        for _ in range(rounds):
            for name, side in sides.items():
                figures = measure(name, side, _SHAPE, demand, seconds)
                costs[name].append(1e6 / figures.requests_per_cpu_s)
        took_s = revocations(port, other, times)
    for name, found in costs.items():
        shown = ", ".join(f"{cost:.0f}" for cost in found)
        typer.echo(
            f"with {name}: {statistics.median(found):.0f} us of the router's CPU time for a "
            f"request ({_SHAPE}; rounds: {shown})"
        )
    typer.echo(
        f"revoked key refused by another router: median {statistics.median(took_s):.2f} s, "
        f"most {max(took_s):.2f} s of {times}"
    )


if __name__ == "__main__":
    typer.run(main)
