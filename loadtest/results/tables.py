"""Tables of a run for the terminal."""

import math

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from loadtest.comparison import Row
from loadtest.metrics.request_figures import FORMULAS
from loadtest.metrics.summary import Summary
from loadtest.metrics.turns import TurnFigures
from loadtest.percent import percent
from loadtest.results.files import Results, SearchPoint

_COLUMNS = ("p50", "p90", "p95", "p99", "max")


def seconds(value: float) -> str:
    """Format a duration: milliseconds below a second, about three digits."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{1e3 * value:.0f} ms" if value >= 0.1 else f"{1e3 * value:.1f} ms"


def show(console: Console, results: Results) -> None:
    """Print a run: latencies with formulas, rates, ends, goodput, client lag."""
    summary = results.summary
    if note := results.server.get("emulated"):
        console.print(Text(f"EMULATED WORKERS: {note}; tokens are made up", style="bold yellow"))
    console.print(_latencies(summary))
    console.print(_formulas(summary))
    console.print(_rates(summary))
    if summary.by_group:
        console.print(_groups(summary))
    if results.turns:
        console.print(turn_table(results.turns))
    if results.search:
        console.print(search_table(results.search))
    for line in _verdicts(results):
        console.print(line)


def _latencies(summary: Summary) -> Table:
    table = Table("", "n", *_COLUMNS, title="latency", title_justify="left")
    for name, distribution in summary.distributions.items():
        cells = (seconds(getattr(distribution, column)) for column in _COLUMNS)
        table.add_row(name, str(distribution.count), *cells)
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _formulas(summary: Summary) -> Text:
    lines = (f"{name} = {FORMULAS[name]}" for name in summary.distributions)
    return Text("\n".join(lines), style="dim")


def _rates(summary: Summary) -> Table:
    table = Table(show_header=False, title="rates", title_justify="left")
    table.add_row("requests sent", f"{summary.sent} in {summary.duration_s:.1f} s")
    ends = ", ".join(f"{count} {end}" for end, count in sorted(summary.ends.items()))
    table.add_row("ends", ends)
    if summary.errors:
        errors = ", ".join(f"{count} × {name}" for name, count in sorted(summary.errors.items()))
        table.add_row("failures", escape(errors))
    table.add_row("completed", f"{summary.requests_per_s:.2f} requests/s")
    table.add_row(
        "tokens",
        f"{summary.prompt_tokens_per_s:.0f} prompt/s, {summary.answer_tokens_per_s:.1f} output/s, "
        f"{summary.tokens_per_chunk:.2f} per chunk",
    )
    cached = summary.cached_tokens / summary.prompt_tokens if summary.prompt_tokens else 0.0
    table.add_row(
        "prefix", f"{summary.cached_tokens} of {summary.prompt_tokens} cached ({percent(cached)})"
    )
    if summary.prefix_tokens_by_source:
        sources = summary.prefix_tokens_by_source.items()
        table.add_row("", ", ".join(f"{source} {count:.0f}" for source, count in sorted(sources)))
    verdict = "met" if summary.slo_met else "missed"
    table.add_row(
        summary.slo.label(),
        f"{verdict}: {percent(summary.attainment)} of the requests sent were good, "
        f"{summary.good_per_s:.2f} good requests/s",
    )
    return table


def _groups(summary: Summary) -> Table:
    figures = (Column(name, no_wrap=True) for name in ("n", "TTFT p50", "p99", "TPOT p50", "p99"))
    table = Table(Column(overflow="fold"), *figures, title="groups", title_justify="left")
    for name, distributions in summary.by_group.items():
        ttft = distributions.get("ttft_s")
        tpot = distributions.get("tpot_s")
        cells = [
            seconds(value) if value is not None else "–"
            for each in (ttft, tpot)
            for value in ((each.p50, each.p99) if each else (None, None))
        ]
        table.add_row(escape(name), str(ttft.count) if ttft else "0", *cells)
    return table


def search_table(points: list[SearchPoint]) -> Table:
    """Return the tried rates, ascending."""
    table = Table("requests/s", "good", "good/s", "", title="search", title_justify="left")
    for point in sorted(points, key=lambda point: point.rate):
        mark = "[green]met[/]" if point.met else "[red]missed[/]"
        note = " [yellow](client was the bottleneck)[/]" if point.client_was_bottleneck else ""
        table.add_row(
            f"{point.rate:.2f}", percent(point.attainment), f"{point.good_per_s:.2f}", mark + note
        )
    return table


def turn_table(turns: list[TurnFigures]) -> Table:
    """Return the turns of agents: TTFT, its ratio to a session alone, cached prompt tokens."""
    columns = ("n", "TTFT p50", "p95", "÷ alone", "cached", "min", "repeated")
    table = Table("turn", *columns, title="turns of all sessions", title_justify="left")
    for turn in turns:
        ttft = turn.ttft_s
        times = (ttft.p50, ttft.p95) if ttft else (None, None)
        shares = (turn.cached_share, turn.cached_share_min, turn.repeated_share)
        table.add_row(
            turn.turn,
            str(turn.requests),
            *("–" if value is None else seconds(value) for value in times),
            "–" if turn.ttft_to_alone is None else f"{turn.ttft_to_alone:.2f}",
            *("–" if share is None else percent(share) for share in shares),
        )
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _verdicts(results: Results) -> list[Text | Group]:
    summary = results.summary
    client = results.summary.client
    lines: list[Text | Group] = [
        Text(
            f"client: sends late by {seconds(client.late_send_p99_s)} at p99, event loop lag "
            f"{seconds(client.lag_p99_s)} at p99, {percent(client.cpu_share, 0)} of a core",
            style="dim",
        )
    ]
    if client.reasons:
        reasons = "; ".join(client.reasons)
        lines.append(Text(f"the client was the bottleneck: {reasons}", style="bold yellow"))
    if summary.uncounted:
        lines.append(
            Text(
                f"{summary.uncounted} responses without usage: their chunks are counted",
                style="yellow",
            )
        )
    if not results.complete:
        lines.append(
            Text(
                f"interrupted after {len(results.records)} of {results.planned_requests} requests; "
                "continue with --resume",
                style="bold yellow",
            )
        )
    return lines


def comparison_table(rows: list[Row], names: tuple[str, str]) -> Table:
    """Return a table of A and B from rows (name, A, B, interval of B ÷ A over seeds).

    ``names`` are the names of A and B, which may be long URLs: they stand above the table.
    """
    runs = max((ratio.runs for *_, ratio in rows if ratio is not None), default=1)
    title = "\n".join(f"{side}: {escape(name)}" for side, name in zip("AB", names, strict=True))
    interval = "95 %" if runs == 1 else f"95 %, {runs} seeds"
    table = Table("", "A", "B", "B ÷ A", interval, title=title, title_justify="left")
    for what, a, b, ratio in rows:
        is_time = what.split()[0].endswith("_s")
        cells = ["–" if value is None else _value(value, is_time) for value in (a, b)]
        confidence = ""
        if ratio is not None and math.isfinite(ratio.half_width):
            low = ratio.mean - ratio.half_width
            confidence = f"{low:.2f} to {ratio.mean + ratio.half_width:.2f}"
        quotient = f"{ratio.mean:.2f}" if ratio is not None else "–"
        table.add_row(what, *cells, quotient, confidence)
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    return table


def _value(value: float, is_time: bool) -> str:
    if is_time:
        return seconds(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
