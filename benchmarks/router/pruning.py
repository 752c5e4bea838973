"""What a placement costs for having looked at few pairs: beside the full product, on a trace.

    python -m benchmarks.router.pruning loadtest/traces/mooncake_conversation.jsonl

The simulator takes a trace through a fleet, and the router's own placer places each request. Of
every so many, all workers alone and all pairs of them are priced as well, by the same model and in
the same state. The regret is what the cheapest that the placer found costs more than the cheapest
there is. Which of those it then takes is drawn among near-ties; that is told apart.
"""

# ruff: noqa: SLF001 - the full product is to be priced from just what the placer sees

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from loadtest.simulator.simulation import Setup, Simulation
from loadtest.workloads.traces import read_trace
from router.routing.placement.cost import Candidate, WorkerLoad, price
from router.routing.placement.placer import Placer
from router.routing.placement.worker_load import Known

Found = tuple[Candidate, Sequence[Candidate]] | None


class Seen(NamedTuple):
    """Costs in seconds of one placement: taken, cheapest of those found, cheapest of all."""

    taken_s: float
    found_s: float
    best_s: float


def _loads(placer: Any, prompt: Any, rates: Any) -> list[WorkerLoad]:
    """All usable workers, as the placer has just priced them."""
    waits = {role: placer._crowding.wait_per_s(role) for role in ("prefill", "decode")}
    loads = []
    for slot in placer._shortlist.usable:
        report, booked = placer._reports.of(slot), placer._book.unreported(slot.worker_id)
        cached_blocks = prompt.held.get(slot.incarnation, 0)
        known = Known(slot, slot.incarnation, report, booked, cached_blocks)
        loads.append(known.load(rates, waits[slot.role], givers=prompt.givers))
    return loads


def best_of_all_s(placer: Any, prompt: Any, rates: Any) -> float:
    """The cost of the cheapest placement of the full product."""
    request, loads = prompt.request, _loads(placer, prompt, rates)
    pairs: list[tuple[WorkerLoad | None, WorkerLoad]] = []
    if request.mode != "disaggregated":
        pairs += [(None, load) for load in loads]
    if request.mode != "colocated":
        prefills = [load for load in loads if load.role == "prefill"]
        decodes = [load for load in loads if load.role == "decode"]
        pairs += [(p, d) for p in prefills for d in decodes if p.format_id == d.format_id]
    return min(
        price(
            prefill=prefill,
            decode=decode,
            prompt_tokens=len(request.prompt),
            expected_tokens=placer._expected_tokens(request),
            choices=request.sampling.n,
            moves_kv=request.sampling.max_tokens > 1,
        ).terms.total_s
        for prefill, decode in pairs
    )


def main(
    trace: Annotated[Path, typer.Argument(help="As for `baton simulate`.")],
    prefill: Annotated[int, typer.Option(help="Prefill workers.")] = 16,
    decode: Annotated[int, typer.Option(help="Decode workers.")] = 16,
    requests: Annotated[int, typer.Option(help="Of the trace, from its beginning.")] = 2000,
    every: Annotated[int, typer.Option(help="Of so many placements one is looked at.")] = 4,
    speed: Annotated[float, typer.Option(help="Divides the gaps between arrivals.")] = 2.0,
) -> None:
    """Simulate, and print the regret of the pruned placement against the full product."""
    seen: list[Seen] = []
    count = 0
    placed = Placer._cheapest_of_all

    def watched(placer: Placer, prompt: Any, rates: Any, now_ns: int) -> Found:
        nonlocal count
        found = placed(placer, prompt, rates, now_ns)
        count += 1
        if found is not None and count % every == 0:
            chosen, compared = found
            best_s = best_of_all_s(placer, prompt, rates)
            seen.append(Seen(chosen.terms.total_s, compared[0].terms.total_s, best_s))
        return found

    Placer._cheapest_of_all = watched  # type: ignore[method-assign, assignment]
    setup = Setup(prefill_workers=prefill, decode_workers=decode, mode="auto", speed=speed)
    Simulation(setup, read_trace(trace)[:requests]).run()
    if not seen:
        raise typer.BadParameter("no placement was priced in C++: is there a compiler?")
    best_s = sum(one.best_s for one in seen)
    missed = sum(one.found_s > one.best_s * (1 + 1e-9) for one in seen)
    typer.echo(f"{len(seen)} of {count} placements, {prefill} x {decode} workers")
    typer.echo(f"regret of pruning    {sum(one.found_s for one in seen) / best_s - 1:8.3%}")
    typer.echo(f"with the draw        {sum(one.taken_s for one in seen) / best_s - 1:8.3%}")
    typer.echo(f"a cheaper one missed {missed / len(seen):8.3%} of placements")


if __name__ == "__main__":
    typer.run(main)
