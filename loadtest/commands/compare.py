"""`baton loadtest compare`: two result files, or two servers under equal load."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from loadtest.commands import options as o
from loadtest.commands.option_groups import with_options
from loadtest.commands.running import INTERRUPTED, run, write_folder
from loadtest.commands.runs import Recording
from loadtest.comparison import compare as rows_of
from loadtest.comparison import unlike
from loadtest.results.files import Results, ResultsError, read_results
from loadtest.results.tables import comparison_table
from loadtest.workloads.plan import Plan
from loadtest.workloads.synthetic import DISTURBANCES, OpenLoop, open_loop_plan


@dataclass(frozen=True, kw_only=True)
class _Recording(Recording):
    limit: Annotated[int | None, typer.Option(min=1, help="Trace requests to use.")] = None
    speed: Annotated[float, typer.Option(help="Divisor of the trace's arrival gaps.")] = 1.0
    shrink: Annotated[float, typer.Option(help="Divisor of the trace's lengths.")] = 1.0


@dataclass(frozen=True, kw_only=True)
class _Arrivals(OpenLoop):
    requests: Annotated[int, typer.Option(min=1, help="Requests per run.")] = 100


@dataclass(frozen=True, kw_only=True)
class _Runs:
    servers: Annotated[
        list[str], typer.Option("--url", help="Server to run on; give it twice, for A and B.")
    ] = field(default_factory=list)
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs' folders (needed with --url).")
    ] = None
    seeds: Annotated[int, typer.Option(min=1, help="Runs of A and of B (with --url).")] = 3
    trace: Annotated[
        Path | None, typer.Option(help="Trace to replay instead of Poisson arrivals (with --url).")
    ] = None
    header_a: Annotated[
        list[str], typer.Option(metavar="NAME: VALUE", help="Header for A only.")
    ] = field(default_factory=list)
    header_b: Annotated[
        list[str], typer.Option(metavar="NAME: VALUE", help="Header for B only.")
    ] = field(default_factory=list)


@with_options(
    "url",
    "model",
    "tenant_keys",
    "token_ids",
    "ignore_eos",
    "headers",
    "timeout_s",
    "cv",
    *DISTURBANCES,
)
def compare(
    recording: _Recording,
    arrivals: _Arrivals,
    choices: o.Choices,
    runs: _Runs,
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[A B]", help="Two result files or folders.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare B with A: latencies, rates, goodput, and confidence intervals of the quotients.

    Compares two result files. With two `--url` (possibly equal, with different `--header-…`), it
    runs each seed's plan on A and then on B, and on B first for every other seed.
    """
    if files and not runs.servers:
        _compare_files(files, as_json=as_json)
        return
    if len(runs.servers) != 2 or files:
        o.fail("give two result files, or --url A --url B")
    if runs.out is None:
        o.fail("--url needs --out DIR")
    sides = []
    for address, headers in zip(runs.servers, (runs.header_a, runs.header_b), strict=True):
        own = replace(choices, url=address, headers=headers)
        sides.append(o.run_options(own, None))
    done: tuple[list[Results], list[Results]] = ([], [])
    for seed in range(runs.seeds):
        plan = _plan(recording, arrivals, runs.trace, seed)
        for side in (0, 1) if seed % 2 == 0 else (1, 0):
            name = f"{'ab'[side]}-seed-{seed}"
            results = run(plan, sides[side], runs.out / name, label=name)
            write_folder(results, runs.out / name)
            if not results.complete:
                raise typer.Exit(INTERRUPTED)
            done[side].append(results)
    _show(*done, _names(runs), as_json=as_json)


def _compare_files(files: list[Path], *, as_json: bool) -> None:
    if len(files) != 2:
        o.fail(f"{len(files)} result files: give two")
    try:
        a, b = (read_results(file) for file in files)
    except ResultsError as error:
        o.fail(str(error))
    _show([a], [b], (str(files[0]), str(files[1])), as_json=as_json)


def _plan(recording: _Recording, arrivals: _Arrivals, trace: Path | None, seed: int) -> Plan:
    with o.refusals():
        if trace is not None:
            return recording.plan(trace, seed)
        return open_loop_plan(arrivals, name="poisson", seed=seed)


def _names(runs: _Runs) -> tuple[str, str]:
    a, b = (
        " ".join([address, *own])
        for address, own in zip(runs.servers, (runs.header_a, runs.header_b), strict=True)
    )
    return a, b


def _show(a: list[Results], b: list[Results], names: tuple[str, str], *, as_json: bool) -> None:
    if as_json:
        rows = [
            {"figure": what, "a": of_a, "b": of_b, "b_to_a": ratio}
            for what, of_a, of_b, ratio in rows_of(a, b)
        ]
        result = {"a": names[0], "b": names[1], "figures": rows, "differences": unlike(a[0], b[0])}
        typer.echo(msgspec.json.format(msgspec.json.encode(result), indent=2))
        return
    console = Console()
    console.print(comparison_table(rows_of(a, b), names))
    for difference in unlike(a[0], b[0]):
        console.print(f"[yellow]the loads differ in {escape(difference)}[/]")
    for name, runs in zip(names, (a, b), strict=True):
        reasons = {reason for run in runs for reason in run.summary.client.reasons}
        if reasons:
            console.print(
                f"[bold yellow]{escape(name)}: the client was the bottleneck: "
                f"{escape('; '.join(sorted(reasons)))}[/]"
            )
