"""``baton simulate``: runs a trace through the fleet's own state machines in virtual time."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.engine.emulated_timing import H100_70B, TIMINGS
from loadtest.simulator.network import LINKS
from loadtest.simulator.policies import FLEET, POLICIES
from loadtest.simulator.report import Figures, Slo, as_json, figures, table
from loadtest.simulator.simulation import Setup, Simulation
from loadtest.workloads.traces import TraceError, read_trace
from router.request import Mode

ALL = "all"


def simulate(
    trace: Annotated[Path, typer.Argument(help="Mooncake JSONL or Azure CSV file.")],
    prefill: Annotated[
        int, typer.Option(min=0, help="Number of prefill workers; 0 for a colocated fleet.")
    ] = 8,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 8,
    policy: Annotated[
        str, typer.Option(help=f"Routing policy: {FLEET}, {', '.join(POLICIES)}, or {ALL}.")
    ] = FLEET,
    json: Annotated[Path | None, typer.Option(help="Output file for the figures.")] = None,
    mode: Annotated[
        str, typer.Option(help="Mode: disaggregated, colocated or auto.")
    ] = "disaggregated",
    worker: Annotated[
        str, typer.Option(help=f"Timing model: {', '.join(TIMINGS)}.")
    ] = H100_70B.name,
    link: Annotated[
        str, typer.Option(help=f"Link between workers: {', '.join(LINKS)}.")
    ] = "between-nodes",
    nodes: Annotated[
        int, typer.Option(min=0, help="Nodes with NVLink inside; 0 for one node per worker.")
    ] = 0,
    prefill_kv_tokens: Annotated[int, typer.Option(min=1024)] = 3_100_160,
    decode_kv_tokens: Annotated[int, typer.Option(min=1024)] = 1_048_576,
    memory_kv_tokens: Annotated[
        int, typer.Option(min=0, help="Memory tier of each prefill worker; 0 for none.")
    ] = 0,
    pull: Annotated[bool, typer.Option(help="Let workers pull prefixes from each other.")] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N requests.")] = None,
    speed: Annotated[
        float, typer.Option(min=0.001, help="Divisor of the gaps between arrivals.")
    ] = 1.0,
    spread_s: Annotated[
        float, typer.Option(min=0, help="Seconds over which to spread the arrivals of a tick.")
    ] = 3.0,
    mtbf_s: Annotated[
        float, typer.Option(min=0, help="Mean seconds until a worker dies; 0 for never.")
    ] = 0.0,
    repair_s: Annotated[
        float, typer.Option(min=0, help="Seconds until a dead worker is replaced.")
    ] = 30.0,
    ttft_s: Annotated[float, typer.Option(min=0, help="TTFT limit of a good request.")] = 10.0,
    tpot_s: Annotated[float, typer.Option(min=0, help="TPOT limit of a good request.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Simulate a fleet under a trace: real routing, queues, schedulers, KV transfers; no model.

    Step times come from a linear model, described in docs/design/simulator.md. The same arguments
    give the same bytes of JSON.
    """
    modes: dict[str, Mode] = {
        "disaggregated": "disaggregated",
        "colocated": "colocated",
        "auto": "auto",
    }
    for value, allowed, option in (
        (policy, [FLEET, *POLICIES, ALL], "--policy"),
        (mode, modes, "--mode"),
        (worker, TIMINGS, "--worker"),
        (link, LINKS, "--link"),
    ):
        if value not in allowed:
            raise typer.BadParameter(
                f"{value!r} is unknown; use one of {', '.join(allowed)}", param_hint=option
            )
    try:
        requests = read_trace(trace, limit)
    except (TraceError, OSError) as error:
        raise typer.BadParameter(str(error), param_hint="TRACE") from error
    slo = Slo(ttft_s=ttft_s, tpot_s=tpot_s)
    results: dict[str, Figures] = {}
    written: list[bytes] = []
    for name in [*POLICIES, FLEET] if policy == ALL else [policy]:
        setup = Setup(
            prefill_workers=prefill,
            decode_workers=decode,
            policy=name,
            mode=modes[mode],
            timing=TIMINGS[worker],
            link=LINKS[link],
            nodes=nodes,
            prefill_kv_tokens=prefill_kv_tokens,
            decode_kv_tokens=decode_kv_tokens,
            memory_kv_tokens=memory_kv_tokens,
            pull_prefixes=pull,
            spread_s=spread_s,
            speed=speed,
            mtbf_s=mtbf_s,
            repair_s=repair_s,
            seed=seed,
        )
        began_s = time.perf_counter()
        simulation = Simulation(setup, requests)
        simulation.run()
        results[name] = figures(simulation, requests, slo)
        written.append(as_json(simulation, results[name], slo))
        sys.stderr.write(
            f"{name}: {len(requests):,} requests, {simulation.clock.now_ns / 1e9:,.0f} s "
            f"simulated in {time.perf_counter() - began_s:.1f} s\n"
        )
    Console().print(table(results))
    if json is not None:
        json.write_bytes(written[0] if len(written) == 1 else b"[" + b",".join(written) + b"]\n")
