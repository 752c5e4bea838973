"""`baton loadtest compare`: two result files, or two servers in turn on equal load."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from loadtest.commands import options as o
from loadtest.commands.loads import Arrivals, Recording
from loadtest.commands.running import INTERRUPTED, leave, run
from loadtest.comparison import compare as rows_of
from loadtest.comparison import unlike
from loadtest.results.files import Results, ResultsError, read_results
from loadtest.results.tables import comparison_table


@dataclass(frozen=True, kw_only=True)
class _Recording(Recording):
    limit: Annotated[int | None, typer.Option(min=1, help="Of the trace.")] = None
    speed: Annotated[float, typer.Option(help="Of the trace.")] = 1.0
    shrink: Annotated[float, typer.Option(help="Of the trace.")] = 1.0


@dataclass(frozen=True, kw_only=True)
class _Arrivals(Arrivals):
    requests: Annotated[int, typer.Option(min=1, help="In one run.")] = 100


@o.with_options(
    "url", "model", "tenant_keys", "token_ids", "ignore_eos", "headers", "timeout_s", "cv"
)
def compare(
    recording: _Recording,
    arrivals: _Arrivals,
    choices: o.Choices,
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[A B]", help="Result files or their folders.")
    ] = None,
    url: Annotated[list[str], typer.Option(help="Twice: run A and B in turn instead.")] = [],  # noqa: B006 - typer copies it
    out: Annotated[
        Path | None, typer.Option(help="With --url: folder for a folder of each run.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="With --url: runs of each.")] = 3,
    trace: Annotated[
        Path | None, typer.Option(help="With --url: play this instead of Poisson arrivals.")
    ] = None,
    header_a: Annotated[
        list[str], typer.Option(metavar="NAME: VALUE", help="Sent to A only.")
    ] = [],  # noqa: B006 - typer copies it
    header_b: Annotated[
        list[str], typer.Option(metavar="NAME: VALUE", help="Sent to B only.")
    ] = [],  # noqa: B006 - typer copies it
) -> None:
    """Put B beside A: latencies, rates, goodput, and how sure the quotients are.

    Two files are compared as they are. With two `--url` (the same one twice compares two
    `--header-…`), each seed's plan is run on A and then on B, on B first for every other seed.
    """
    if files and not url:
        if len(files) != 2:
            o.fail(f"{len(files)} files: two are compared")
        try:
            a, b = (read_results(file) for file in files)
        except ResultsError as error:
            o.fail(str(error))
        _show([a], [b], (str(files[0]), str(files[1])))
        return
    if len(url) != 2 or files:
        o.fail("give two result files, or --url A --url B")
    if out is None:
        o.fail("--url needs --out DIR for the results")
    sides = []
    for address, headers in zip(url, (header_a, header_b), strict=True):
        own = replace(choices, url=address, headers=headers)
        sides.append(o.run_options(own, None))
    runs: tuple[list[Results], list[Results]] = ([], [])
    for seed in range(seeds):
        try:
            if trace is not None:
                plan = recording.plan(trace, seed)
            else:
                plan = arrivals.plan("poisson", seed)
        except (ValueError, OSError) as error:
            o.fail(str(error))
        for side in (0, 1) if seed % 2 == 0 else (1, 0):
            name = f"{'ab'[side]}-seed-{seed}"
            results = run(plan, sides[side], out / name, label=name)
            leave(results, out / name)
            if not results.complete:
                raise typer.Exit(INTERRUPTED)
            runs[side].append(results)
    _show(*runs, _names(url, header_a, header_b))


def _names(url: list[str], header_a: list[str], header_b: list[str]) -> tuple[str, str]:
    """What the columns are called: by address, or by header where the address is the same."""
    a, b = (
        " ".join([address, *own]) for address, own in zip(url, (header_a, header_b), strict=True)
    )
    return a, b


def _show(a: list[Results], b: list[Results], names: tuple[str, str]) -> None:
    console = Console()
    console.print(comparison_table(rows_of(a, b), names))
    for difference in unlike(a[0], b[0]):
        console.print(f"[yellow]the loads differ in {escape(difference)}[/]")
    for name, runs in zip(names, (a, b), strict=True):
        reasons = {reason for run in runs for reason in run.summary.client.reasons}
        if reasons:
            console.print(
                f"[bold yellow]{escape(name)}: THE CLIENT WAS THE BOTTLENECK: "
                f"{escape('; '.join(sorted(reasons)))}[/]"
            )
