"""First tokens of a real fleet whose prompts share long prefixes, with pulls and without.

    python -m benchmarks.kv.fleet_pulls [--rounds 3] [--requests 40] [--rate 0.5]
                                            [--workers 2] [--groups 8] [--prefix-tokens 1536]

One router and some workers that do both parts, with the real engine (SmolLM2). Each request has the
long prefix of one of the groups and a question of its own, which is as long again for each third
one: so whoever holds a prefix is busy at times while another worker is not. At first each prefix is
asked for once. In each round the same requests go to two fresh fleets, in an order that turns: one
as it is, one with `pull_prefixes: false`.

TTFT     from the intended send, so waiting in the client counts
tokens   of prompts, by where they came from: computed, local (in the worker's own cache), peer
pulls    links of chains by outcome, as `baton_prefix_pulls_total` counts them
CPU      of all processes of the fleet during the load: beside other work it says more than a clock
"""

import contextlib
import os
import statistics
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

import httpx
import psutil
import typer
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from benchmarks.layouts import SLO, bench_fleet
from loadtest.client.records import ServerOptions
from loadtest.client.server import Server
from loadtest.results.files import Results
from loadtest.run import RunOptions, run_plan
from loadtest.workloads.lengths import parse_lengths
from loadtest.workloads.plan import Conversation, Plan, Segment, Turn
from loadtest.workloads.synthetic import OpenLoop, open_loop_plan

_PAUSE_S = 4.0


class Seen(NamedTuple):
    """One run."""

    ttft_p50_s: float
    ttft_p99_s: float
    tokens: Counter[str]
    pulls: Counter[str]
    cpu_s: float
    ends: dict[str, int]

    def line(self) -> str:
        """In words."""
        tokens = ", ".join(f"{source} {count:,}" for source, count in sorted(self.tokens.items()))
        pulls = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.pulls.items()))
        return (
            f"TTFT p50 {self.ttft_p50_s:.3f} s, p99 {self.ttft_p99_s:.3f} s; prompt tokens: "
            f"{tokens}; pulls: {pulls or 'none'}; CPU {self.cpu_s:.1f} s; {self.ends}"
        )


def counters(url: str, name: str, label: str) -> Counter[str]:
    """One of the workers' counters by a label, over all of them."""
    found: Counter[str] = Counter()
    targets = httpx.get(f"{url}/fleet/targets", timeout=10, trust_env=False).json()
    workers = [one["targets"][0] for one in targets if one["labels"]["component"] == "worker"]
    for address in workers:
        page = httpx.get(f"http://{address}/metrics", timeout=10, trust_env=False).text
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == f"{name}_total":
                    found[sample.labels[label]] += int(sample.value)
    return found


def cpu_s() -> float:
    """CPU time of what this process has started: the fleet, and no clients."""
    total_s = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s


def run(plan: Plan, url: str) -> Results:
    """One load."""
    with Server(url, "") as server:
        wanted = ServerOptions(url=server.url, model=server.first_model(), ignore_eos=True)
        return run_plan(plan, RunOptions(server=server.settle(wanted), slo=SLO))


def measure(url: str, plan: Plan) -> Seen:
    """A fresh fleet gets each prefix once, and learns how fast it is; then the load."""
    run(_each_prefix_once(plan), url)
    before = [counters(url, *of) for of in _COUNTED]
    began_s = cpu_s()
    summary = run(plan, url).summary
    spent_s = cpu_s() - began_s
    tokens, pulls = (counters(url, *of) - first for of, first in zip(_COUNTED, before, strict=True))
    tokens["local"] -= tokens["peer"]  # the request itself finds them in its worker's cache
    ttft = summary.distributions["ttft_s"]
    return Seen(ttft.p50, ttft.p99, tokens, pulls, spent_s, dict(summary.ends))


def _each_prefix_once(plan: Plan) -> Plan:
    prefixes: dict[Segment, Turn] = {}
    for turn in plan.turns():
        prefixes.setdefault(turn.prompt[0], turn)
    return replace(
        plan,
        name="each prefix once",
        conversations=tuple(
            Conversation(start_s=_PAUSE_S * place, turns=(replace(turn, prompt=(prefix,)),))
            for place, (prefix, turn) in enumerate(prefixes.items())
        ),
    )


_COUNTED = (("baton_prefix_tokens", "source"), ("baton_prefix_pulls", "outcome"))


def main(
    rounds: int = 3,
    requests: Annotated[int, typer.Option(help="Of each run.")] = 40,
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 0.5,
    workers: Annotated[int, typer.Option(help="Of one pool, which does both parts.")] = 2,
    groups: Annotated[int, typer.Option(help="Prefixes.")] = 8,
    prefix_tokens: Annotated[int, typer.Option(help="Of each, in words of the load.")] = 1536,
    kv_blocks: Annotated[int, typer.Option(help="Of each worker, of 16 tokens.")] = 2048,
) -> None:
    """Print each run, and medians; alone on the machine, or with the load that it prints."""
    console = Console(soft_wrap=True)
    seen: dict[str, list[Seen]] = {"pulls": [], "no pulls": []}
    for turn in range(rounds):
        load = OpenLoop(
            requests=requests,
            rate=rate,
            prompt_tokens=parse_lengths("uniform:24-48"),
            answer_tokens=parse_lengths("uniform:16-48"),
            long_every=3,
            long_tokens=prefix_tokens,
            prefix_groups=groups,
            prefix_tokens=prefix_tokens,
        )
        plan = open_loop_plan(load, name="shared prefixes", seed=turn)
        for name in list(seen) if turn % 2 == 0 else list(seen)[::-1]:
            began_s = time.monotonic()
            with TemporaryDirectory() as folder:
                where = Path(folder) / name.replace(" ", "-")
                settings = (
                    f"pools: {{prefill: 0, decode: {workers}, pull_prefixes: {name == 'pulls'}}}\n"
                    f"kv_blocks_per_worker: {kv_blocks}\n"
                )
                with bench_fleet(where, settings) as url:
                    one = measure(url, plan)
            seen[name].append(one)
            took_s, busy = time.monotonic() - began_s, os.getloadavg()[0]
            console.print(f"round {turn}, {name}: {one.line()}; {took_s:.0f} s, load {busy:.1f}")
    console.print(_table(seen))


def _table(seen: dict[str, list[Seen]]) -> Table:
    table = Table("medians of all rounds; tokens and pulls: sums", *seen)
    runs = list(seen.values())
    for name, values in (
        ("TTFT p50, s", [[one.ttft_p50_s for one in of] for of in runs]),
        ("TTFT p99, s", [[one.ttft_p99_s for one in of] for of in runs]),
        ("CPU, s", [[one.cpu_s for one in of] for of in runs]),
    ):
        table.add_row(name, *(f"{statistics.median(of):.3f}" for of in values))
    for name in ("computed", "local", "peer"):
        table.add_row(
            f"{name} tokens", *(f"{sum(one.tokens[name] for one in of):,}" for of in runs)
        )
    for name in ("pulled", "refused", "late", "abandoned"):
        table.add_row(f"pulls {name}", *(str(sum(one.pulls[name] for one in of)) for of in runs))
    return table


if __name__ == "__main__":
    typer.run(main)
