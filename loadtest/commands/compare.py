"""`baton loadtest compare`: two result files, or two servers in turn on equal load."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from loadtest.commands import options as o
from loadtest.commands.running import INTERRUPTED, leave, run
from loadtest.comparison import compare as rows_of
from loadtest.comparison import unlike
from loadtest.results.files import Results, ResultsError, read_results
from loadtest.results.tables import comparison_table
from loadtest.workloads.lengths import LengthsError, parse_lengths
from loadtest.workloads.plan import Plan
from loadtest.workloads.replay import replay_plan
from loadtest.workloads.synthetic import OpenLoop, open_loop_plan
from loadtest.workloads.traces import TraceError, read_trace


def compare(
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
    limit: Annotated[int | None, typer.Option(min=1, help="Of the trace.")] = None,
    speed: Annotated[float, typer.Option(help="Of the trace.")] = 1.0,
    shrink: Annotated[float, typer.Option(help="Of the trace.")] = 1.0,
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 1.0,
    requests: Annotated[int, typer.Option(min=1, help="In one run.")] = 100,
    prompt_tokens: o.PromptTokens = "lognormal:128,0.8,1024",
    answer_tokens: o.AnswerTokens = "lognormal:32,0.6,256",
    header_a: Annotated[
        list[str], typer.Option(metavar="NAME: VALUE", help="Sent to A only.")
    ] = [],  # noqa: B006 - typer copies it
    header_b: Annotated[
        list[str], typer.Option(metavar="NAME: VALUE", help="Sent to B only.")
    ] = [],  # noqa: B006 - typer copies it
    api_key: o.ApiKey = "",
    endpoint: o.Endpoint = "chat",
    clients: o.Clients = 1,
    slo: o.SloText = o.DEFAULT_SLO,
    quantile: o.Quantile = 0.9,
    warmup_s: o.Warmup = 0.0,
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
        choices = o.Choices(
            url=address,
            api_key=api_key,
            endpoint=endpoint,
            headers=headers,
            clients=clients,
            slo=slo,
            quantile=quantile,
            warmup_s=warmup_s,
        )
        sides.append(o.run_options(choices, None))
    runs: tuple[list[Results], list[Results]] = ([], [])
    for seed in range(seeds):
        try:
            if trace is not None:
                plan = _trace_plan(trace, limit, speed, shrink, seed)
            else:
                plan = _poisson_plan(rate, requests, prompt_tokens, answer_tokens, seed)
        except (TraceError, LengthsError, ValueError, OSError) as error:
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


def _poisson_plan(rate: float, requests: int, prompts: str, answers: str, seed: int) -> Plan:
    load = OpenLoop(
        requests=requests,
        rate=rate,
        prompt_tokens=parse_lengths(prompts),
        answer_tokens=parse_lengths(answers),
    )
    parameters: dict[str, str | int | float] = {"rate": rate, "requests": requests}
    parameters |= {"prompt_tokens": prompts, "answer_tokens": answers}
    plan = open_loop_plan(load, name="poisson", seed=seed)
    return msgspec.structs.replace(plan, parameters=parameters)


def _trace_plan(trace: Path, limit: int | None, speed: float, shrink: float, seed: int) -> Plan:
    requests = read_trace(trace, limit)
    return replay_plan(requests, name=trace.name, speed=speed, shrink=shrink, seed=seed)


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
