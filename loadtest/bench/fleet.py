"""A whole fleet on this machine, beside `llama-server` with the same weights and threads.

    python -m loadtest.bench.fleet --out DIR [--rounds 3]

Closed loop: 1, 4 and 16 clients who each ask again as soon as they have their answer, 64 tokens,
streamed. Every layout of ``loadtest.bench.layouts`` is a column; the last row of each table is the
ratio to llama-server, of tokens per second. Medians over rounds, in an order that turns.
"""

import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from loadtest.bench.layouts import PEER, SERVERS, columns, run_one
from loadtest.results.files import Results
from loadtest.workloads.lengths import parse_lengths
from loadtest.workloads.plan import Plan
from loadtest.workloads.synthetic import Sessions, session_plan

CLIENTS = (1, 4, 16)
ANSWER_TOKENS = 64
_ASKED_BY_EACH = {1: 8, 4: 4, 16: 3}
_FIGURES = {"tokens/s": "", "TTFT p50 s": "ttft_s", "ITL p50 s": "itl_s"}


def load(clients: int, seed: int) -> Plan:
    """So many clients without a pause."""
    sessions = Sessions(
        users=clients,
        sessions=_ASKED_BY_EACH[clients],
        turns=1,
        system_tokens=0,
        prompt_tokens=parse_lengths("uniform:32-96"),
        answer_tokens=parse_lengths(str(ANSWER_TOKENS)),
        think_s=0.0,
        ramp_s=0.0,
    )
    return session_plan(sessions, name=f"{clients} clients", seed=seed)


def measure(out: Path, rounds: int, console: Console) -> dict[int, dict[str, list[Results]]]:
    """All runs: number of clients to layout to the results of each round."""
    layouts = columns(console)
    found: dict[int, dict[str, list[Results]]] = {}
    for turn in range(rounds):
        for layout in layouts if turn % 2 == 0 else reversed(layouts):
            start = SERVERS[layout.server]
            with TemporaryDirectory() as folder, start(Path(folder) / layout.server) as url:
                for clients in CLIENTS:
                    where = out / f"{clients}-{layout.name}-{turn}"
                    run = run_one(load(clients, turn), url, layout, where)
                    found.setdefault(clients, {}).setdefault(layout.name, []).append(run)
                    console.print(f"{clients} clients, {layout.name}: {run.summary.ends}")
    return found


def _median(runs: list[Results], distribution: str) -> float:
    if not distribution:
        return statistics.median(run.summary.answer_tokens_per_s or 0.0 for run in runs)
    return statistics.median(run.summary.distributions[distribution].p50 for run in runs)


def main(
    out: Annotated[Path, typer.Option(help="Folder of all results.")],
    rounds: Annotated[int, typer.Option(min=1, max=20)] = 3,
) -> None:
    """Run the comparison; alone on the machine."""
    console = Console(soft_wrap=True)
    told: dict[str, dict[str, dict[str, float]]] = {}
    for clients, runs in measure(out, rounds, console).items():
        figures = {
            layout: {name: _median(of, field) for name, field in _FIGURES.items()}
            for layout, of in runs.items()
        }
        told[f"{clients} clients"] = figures
        table = Table(f"{clients} clients", *figures)
        for name in _FIGURES:
            table.add_row(name, *(f"{column[name]:.3g}" for column in figures.values()))
        if PEER.name in figures:
            peer = figures[PEER.name]["tokens/s"]
            ratios = (column["tokens/s"] / peer for column in figures.values())
            table.add_row(f"÷ {PEER.name}", *(f"{ratio:.2f}" for ratio in ratios))
        console.print(table)
    (out / "fleet.json").write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    typer.run(main)
