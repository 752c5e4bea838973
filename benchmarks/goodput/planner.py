"""The planner of roles beside an oracle that knows the best split of every window.

    python -m benchmarks.goodput.planner TRACE [--shift] [--speed 3] [--window-s 60] [--json FILE]

Each fixed split is simulated once. The oracle starts with any split and changes it between windows:
it gets the good requests of each window's split, less what its turns cost, and dynamic programming
finds the best order. A turn costs what one worker serves until routers place by its new role. Each
fixed run carries what it has not served into its next window, so the oracle is no strict bound.
With latency limits little is carried.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from baton.types.slo import Slo
from loadtest.percent import percent
from loadtest.simulator.goodput import is_good
from loadtest.simulator.simulation import TURN_NS, Plan, Setup, Simulation
from loadtest.workloads.shifting import shifting
from loadtest.workloads.traces import TraceRequest, read_trace


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Good requests by run; splits are numbers of prefill workers."""

    requests: int
    window_s: float
    fixed: dict[int, list[int]]  # by split and window
    oracle: float
    oracle_splits: list[int]
    planner: dict[int, int]  # by the split at the start
    turns: dict[int, int]


def best_order(
    good: Mapping[int, Sequence[float]], turn_costs: Sequence[float]
) -> tuple[float, list[int]]:
    """Return the good requests of the best split for each window, and these splits.

    Args:
        good: Good requests by split and window.
        turn_costs: Good requests that one turn before each window costs; the first is not used.
    """
    totals = {split: float(windows[0]) for split, windows in good.items()}
    orders = {split: [split] for split in good}
    for window in range(1, len(turn_costs)):
        cost = turn_costs[window]
        before = totals
        came = orders
        totals = {}
        orders = {}
        for split, windows in good.items():
            kept = {one: before[one] - cost * abs(one - split) for one in before}
            last = max(kept, key=kept.__getitem__)
            totals[split] = kept[last] + windows[window]
            orders[split] = [*came[last], split]
    best = max(totals, key=totals.__getitem__)
    return totals[best], orders[best]


def compare(
    setup: Setup,
    requests: Sequence[TraceRequest],
    splits: Sequence[int],
    starts: Sequence[int],
    window_s: float,
) -> Result:
    """Simulate the fixed splits and the planner from each start."""
    workers = setup.prefill_workers + setup.decode_workers
    fixed: dict[int, list[int]] = {}
    for split in splits:
        fixed[split] = _by_window(_run(setup, requests, split, "fixed"), window_s)
    costs = [
        max(windows) / window_s / workers * TURN_NS / 1e9
        for windows in zip(*fixed.values(), strict=True)
    ]
    total, order = best_order(fixed, costs)
    planned = {start: _run(setup, requests, start, "auto") for start in starts}
    return Result(
        requests=len(requests),
        window_s=window_s,
        fixed=fixed,
        oracle=round(total, 1),
        oracle_splits=order,
        planner={start: sum(_by_window(run, window_s)) for start, run in planned.items()},
        turns={start: run.turns for start, run in planned.items()},
    )


def _run(setup: Setup, requests: Sequence[TraceRequest], split: int, plan: Plan) -> Simulation:
    workers = setup.prefill_workers + setup.decode_workers
    run = replace(setup, prefill_workers=split, decode_workers=workers - split, plan=plan)
    simulation = Simulation(run, requests)
    simulation.run()
    Console(stderr=True).print(f"{plan} from {split} + {workers - split}: done")
    return simulation


def _by_window(simulation: Simulation, window_s: float) -> list[int]:
    slo = simulation.setup.slo
    if slo is None:
        raise ValueError("the planner needs limits of latency (slo)")
    window_ns = round(window_s * 1e9)
    records = simulation.records
    good = [0] * (max(record.sent_ns for record in records) // window_ns + 1)
    for record in records:
        good[record.sent_ns // window_ns] += is_good(record, simulation.setup, slo)
    return good


def main(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSONL or Azure CSV file.")],
    shift: Annotated[
        bool, typer.Option("--shift", help="Change the mix every 10 minutes.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N requests.")] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="Divisor of the gaps.")] = 3.0,
    workers: Annotated[int, typer.Option(min=3, help="Workers of both roles.")] = 8,
    splits: Annotated[str, typer.Option(help="Prefill workers of fixed splits.")] = "3,4,5,6,7",
    starts: Annotated[str, typer.Option(help="Prefill workers at the planner's start.")] = "3",
    batch: Annotated[int, typer.Option(min=1, help="Sequences per worker.")] = 128,
    slo_ttft_s: Annotated[float, typer.Option(min=0.001, help="Limit of TTFT.")] = 3.0,
    slo_itl_s: Annotated[float, typer.Option(min=0.0001, help="Limit of ITL.")] = 0.03,
    window_s: Annotated[float, typer.Option(min=1, help="Length of a window.")] = 60.0,
    json: Annotated[Path | None, typer.Option(help="Output file.")] = None,
) -> None:
    """Print the share of an oracle's good requests that the planner and each fixed split have."""
    requests = read_trace(trace, limit)
    if shift:
        requests = shifting(requests)
    setup = Setup(
        prefill_workers=1,
        decode_workers=workers - 1,
        speed=speed,
        max_batch_requests=batch,
        prefill_kv_tokens=2_050_048,
        decode_kv_tokens=2_050_048,
        slo=Slo(ttft_s=slo_ttft_s, itl_s=slo_itl_s),
    )
    found = compare(
        setup,
        requests,
        [int(split) for split in splits.split(",")],
        [int(split) for split in starts.split(",")],
        window_s,
    )
    table = Table("run", "good", "of all", "of the oracle", "turns")
    order = found.oracle_splits
    oracle_turns = sum(abs(after - before) for before, after in pairwise(order))
    rows = [(f"fixed {split}", sum(good), 0) for split, good in found.fixed.items()]
    rows += [(f"planner from {one}", good, found.turns[one]) for one, good in found.planner.items()]
    rows.append((f"oracle {order}", round(found.oracle), oracle_turns))
    for name, good, turns in rows:
        shares = (percent(good / found.requests), f"{good / found.oracle:.3f}")
        table.add_row(name, str(good), *shares, str(turns))
    Console().print(table)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")


if __name__ == "__main__":
    typer.run(main)
