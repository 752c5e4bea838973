"""A whole fleet on this machine, beside `llama-server` with the same weights and threads.

    python -m benchmarks.fleet --out DIR [--rounds 3] [--only pair,llama-server]

Closed loop: 1, 4 and 16 clients, each with one streamed request of 64 output tokens after another.
Open loop: one request per second, every fourth with a prompt of 1,024 tokens. Columns:

- ``pair``: one prefill and one decode worker that lend each other their cores (``auto`` threads)
- ``pinned``: the same two, each on its half of the cores
- ``colocated``: one worker with all cores

The last row of each table is the ratio to llama-server, of tokens per second. Cells are medians
over rounds, in alternating order.
"""

import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.layouts import PEER, SERVERS, Layout, columns, run_one
from loadtest.results.files import Results
from loadtest.workloads.plan import Plan
from loadtest.workloads.synthetic import OpenLoop, Sessions, open_loop_plan, session_plan

AUTO = {"x-baton-mode": "auto"}
LAYOUTS = (
    Layout(name="pair", server="lending", headers=AUTO),
    Layout(name="pinned", server="pair", headers=AUTO),
    Layout(name="colocated", server="one", headers=AUTO),
)
CLIENTS = (1, 4, 16)
ANSWER_TOKENS = 64
_ASKED_BY_EACH = {1: 5, 4: 3, 16: 2}
_OPEN_REQUESTS = 16
_FIGURES = {"tokens/s": ("", ""), "TTFT p50 s": ("ttft_s", "p50"), "ITL p50 s": ("itl_s", "p50")}
_OPEN_FIGURES = {"TTFT p99 s": ("ttft_s", "p99"), "ITL p99 s": ("itl_s", "p99")}


def load(clients: int, seed: int, answer_tokens: int = ANSWER_TOKENS) -> Plan:
    """Return a plan of so many clients without a pause."""
    sessions = Sessions(
        users=clients,
        sessions=_ASKED_BY_EACH[clients],
        turns=1,
        system_tokens=0,
        prompt_tokens="uniform:32-96",
        answer_tokens=str(answer_tokens),
        think_s=0.0,
    )
    return session_plan(sessions, name=f"{clients} clients", seed=seed, ramp_s=0.0)


def loads(seed: int) -> dict[str, Plan]:
    """Return all loads of one round."""
    open_loop = OpenLoop(
        requests=_OPEN_REQUESTS,
        rate=1.0,
        prompt_tokens="uniform:32-96",
        answer_tokens="uniform:24-48",
        long_every=4,
        long_tokens=1024,
    )
    return {
        **{f"{clients} clients": load(clients, seed) for clients in CLIENTS},
        "open loop": open_loop_plan(open_loop, name="open loop", seed=seed),
    }


def measure(
    out: Path, rounds: int, only: str, console: Console
) -> dict[str, dict[str, list[Results]]]:
    """Run everything; return the results of each round, by load and layout."""
    wanted = only.split(",") if only else [*(layout.name for layout in LAYOUTS), PEER.name]
    layouts = [layout for layout in columns(console, LAYOUTS) if layout.name in wanted]
    found: dict[str, dict[str, list[Results]]] = {}
    for turn in range(rounds):
        for layout in layouts if turn % 2 == 0 else reversed(layouts):
            start = SERVERS[layout.server]
            with TemporaryDirectory() as folder, start(Path(folder) / layout.server) as url:
                for what, plan in loads(turn).items():
                    where = out / f"{what.replace(' ', '-')}-{layout.name}-{turn}"
                    run = run_one(plan, url, layout, where)
                    found.setdefault(what, {}).setdefault(layout.name, []).append(run)
                    rate = run.summary.answer_tokens_per_s or 0.0
                    console.print(f"{what}, {layout.name}: {run.summary.ends}, {rate:.1f} tokens/s")
    return found


def _median(runs: list[Results], distribution: str, field: str) -> float:
    if not distribution:
        return statistics.median(run.summary.answer_tokens_per_s or 0.0 for run in runs)
    return statistics.median(
        float(getattr(run.summary.distributions[distribution], field)) for run in runs
    )


def main(
    out: Annotated[Path, typer.Option(help="Folder of all results.")],
    rounds: Annotated[int, typer.Option(min=1, max=20, help="Rounds in turns.")] = 3,
    only: Annotated[str, typer.Option(help="Columns to run: NAME,NAME; by default all.")] = "",
) -> None:
    """Compare a fleet with llama-server; nothing else may run on the machine."""
    console = Console(soft_wrap=True)
    record: dict[str, dict[str, dict[str, float]]] = {}
    for what, runs in measure(out, rounds, only, console).items():
        wanted = _FIGURES if "clients" in what else {**_FIGURES, **_OPEN_FIGURES}
        figures = {
            layout: {name: _median(of, *field) for name, field in wanted.items()}
            for layout, of in runs.items()
        }
        record[what] = figures
        table = Table(what, *figures)
        for name in wanted:
            table.add_row(name, *(f"{column[name]:.3g}" for column in figures.values()))
        if PEER.name in figures:
            peer = figures[PEER.name]["tokens/s"]
            ratios = (column["tokens/s"] / peer for column in figures.values())
            table.add_row(f"÷ {PEER.name}", *(f"{ratio:.2f}" for ratio in ratios))
        console.print(table)
    (out / "fleet.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    typer.run(main)
