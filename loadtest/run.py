"""Load test from plan to results; records are saved as they arrive and survive Ctrl-C."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from loadtest.client.processes import run_clients
from loadtest.client.records import CallRecord, ClientReport, ServerOptions
from loadtest.client.server import Server
from loadtest.metrics.summary import LatencyGoals, summarise
from loadtest.results.files import Journal, Results
from loadtest.workloads.plan import Plan


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run."""

    server: ServerOptions
    slo: LatencyGoals = field(default_factory=LatencyGoals)
    clients: int = 1  # number of client processes
    warmup_s: float = 0.0  # seconds from the start that the figures exclude
    command: str = ""  # command line, for the report


@dataclass
class _Progress:
    records: list[CallRecord]
    clients: list[ClientReport]
    complete: bool = False


def run_plan(
    plan: Plan,
    options: RunOptions,
    *,
    folder: Path | None = None,
    resume: bool = False,
    on_record: Callable[[CallRecord], None] = lambda _: None,
) -> Results:
    """Run a load test. SIGINT ends it early, with the records so far.

    Args:
        plan: Requests and their times.
        options: Server, SLO and clients.
        folder: Folder for the records of an interrupted run, or None.
        resume: Continue the interrupted run in the folder. The plan continues at the first request
            that is not done; unfinished conversations start again.
        on_record: Callback for every finished request, including those of the interrupted run.

    Raises:
        ResultsError: The interrupted run in the folder is a different one.
        ClientFailedError: A client process died.
        ServerError: The server does not answer.
    """
    server = options.server
    journal = None
    kept: list[CallRecord] = []
    if folder is not None:
        journal = Journal(folder, plan.digest(), f"{server.url} {server.model}")
        kept = journal.load() if resume else []
    left = plan.without({record.index for record in kept})
    again = {turn.index for turn in left.turns()}
    kept = [record for record in kept if record.index not in again]
    progress = _Progress(list(kept), [])
    for record in kept:
        on_record(record)
    if journal is not None:
        journal.begin(kept)

    def took(record: CallRecord) -> None:
        progress.records.append(record)
        if journal is not None:
            journal.add(record)
        on_record(record)

    with Server(server.url, server.api_key) as probe:
        emulated = probe.emulated()
        before = probe.prefix_tokens_by_source()
        try:
            asyncio.run(_run_until_interrupted(left, options, took, progress))
        finally:
            if journal is not None:
                journal.close(complete=progress.complete)
        after = probe.prefix_tokens_by_source()
    sources = {name: count - before.get(name, 0.0) for name, count in after.items()}
    return _results(plan, options, progress, sources, emulated)


async def _run_until_interrupted(
    plan: Plan, options: RunOptions, took: Callable[[CallRecord], None], progress: _Progress
) -> None:
    loop = asyncio.get_running_loop()
    interrupted = False
    try:
        async with asyncio.timeout(None) as limit:

            def stop() -> None:
                nonlocal interrupted
                interrupted = True
                limit.reschedule(loop.time())

            loop.add_signal_handler(signal.SIGINT, stop)
            try:
                progress.clients = await run_clients(
                    plan, options.server, clients=options.clients, record=took
                )
                progress.complete = True
            finally:
                loop.remove_signal_handler(signal.SIGINT)
    except TimeoutError:
        if not interrupted:
            raise


def _results(
    plan: Plan, options: RunOptions, progress: _Progress, sources: dict[str, float], emulated: str
) -> Results:
    server = options.server
    records = sorted(progress.records, key=lambda record: record.index)
    return Results(
        command=options.command,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        url=server.url,
        model=server.model,
        server={
            **({"emulated": f"no model ran: timing model {emulated}"} if emulated else {}),
            "endpoint": server.endpoint,
            "prompts": "token ids" if server.token_ids else "text",
            **({"tools": server.tools} if server.tools else {}),
            "ignore_eos": str(server.ignore_eos).lower(),
            **{f"header {name}": value for name, value in server.headers.items()},
        },
        workload=plan.name,
        seed=plan.seed,
        parameters=plan.parameters,
        planned_requests=plan.request_count,
        complete=progress.complete,
        summary=summarise(
            records,
            progress.clients,
            slo=options.slo,
            warmup_s=options.warmup_s,
            prefix_tokens_by_source=sources,
        ),
        clients=progress.clients,
        records=records,
    )
