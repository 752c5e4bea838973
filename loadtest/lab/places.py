"""Engine or fleet of a lab: an engine in its own process, or a running or new fleet."""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.markup import escape

from baton.config.fleet_file import DEFAULT_MODEL
from baton.telemetry.progress import Progress
from loadtest.commands.options import FindFleet, echo
from loadtest.commands.running import END_SIGNALS, INTERRUPTED
from loadtest.lab.results import Findings
from loadtest.lab.table import LABS, LabContext

_START_LIMIT_S = 600.0
_STOP_LIMIT_S = 30.0


class LabError(RuntimeError):
    """A lab cannot be run; the message has the reason."""


def machine() -> str:
    """Return the processor name and the number of cores."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    cpu = re.search(r"model name\s*: (.*)", text)
    return f"{cpu[1] if cpu else 'unknown processor'}, {os.cpu_count()} cores"


def run_in_process(name: str, context: LabContext) -> Findings:
    """Run a lab with an engine in a new process, whose threads are set before torch is imported."""
    threads = str(context.threads)
    echo(f"[dim]starting an engine with {escape(context.model)}[/]")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "loadtest.lab.places", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    # Ctrl-C ends the measurement there, and its findings are still read here.
    before = signal.signal(signal.SIGINT, lambda *_: process.send_signal(signal.SIGINT))
    try:
        written, _ = process.communicate(msgspec.json.encode(context))
    finally:
        signal.signal(signal.SIGINT, before)
    if process.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    if process.returncode:
        raise LabError(f"the lab's process ended with exit code {process.returncode}")
    return msgspec.json.decode(written, type=Findings)


@contextlib.contextmanager
def fleet_of(
    context: LabContext, fleet_file: Path | None, find_fleet: FindFleet | None
) -> Iterator[LabContext]:
    """Yield the context with the URL of a fleet: the given one, a new one, or the local one."""
    url = context.url
    if fleet_file is not None and not url:
        with _started(fleet_file) as started:
            yield replace(context, url=started)
        return
    local = find_fleet() if find_fleet is not None and not url else None
    if local is not None:
        key = context.api_key or local.operator_key
        yield replace(context, url=local.url, api_key=key)
        return
    if not url:
        raise LabError("this lab needs a fleet: set --url or --fleet FILE, or run `baton up` first")
    yield replace(context, url=url.rstrip("/").removesuffix("/v1"))


@contextlib.contextmanager
def emulated_fleet(
    context: LabContext, timings: Mapping[str, str] | None = None
) -> Iterator[LabContext]:
    """Yield the context with the URL and the operator's key of a new emulated fleet.

    ``timings`` are those of several models with one worker each.
    """
    key = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="baton-lab-") as folder:
        file = Path(folder) / "fleet.yaml"
        file.write_text(_emulated(context.workers, key, timings or {}))
        with _started(file) as started:
            yield replace(context, url=started, api_key=key)


def _emulated(workers: int, key: str, timings: Mapping[str, str]) -> str:
    own = [
        f"model: {DEFAULT_MODEL}",
        f"pools: {{prefill: 1, decode: {workers - 1}, engine: emulated}}",
        "slo: {ttft_s: 3, itl_s: 0.06}",
    ]
    if timings:
        lines = [
            f"  {name}: {{model: {DEFAULT_MODEL}, pools: {{engine: {{emulated: {timing}}}}}}}"
            for name, timing in timings.items()
        ]
        own = ["models:", *lines, "pools: {prefill: 0, decode: 1}"]
    models = "\n".join(own)
    return f"""fleet: lab
{models}
max_context_tokens: 4096
kv_blocks_per_worker: 4096
cpus_per_rank: 0.04
api_keys: {{{key}: {{role: operator}}}}
host: 127.0.0.1
redis: embedded
"""


@contextlib.contextmanager
def _started(file: Path) -> Iterator[str]:
    echo(f"[dim]starting a fleet of {file}[/]")
    with tempfile.TemporaryDirectory(prefix="baton-lab-") as home:
        output = Path(home) / "output"
        with output.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fleet.cli.main", "up", str(file)],
                env={**os.environ, "BATON_HOME": home, "BATON_PORT": "0"},
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            with awaiting("the fleet") as progress:
                url = _wait_ready(process, output, progress)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(process: "subprocess.Popen[bytes]", output: Path, progress: Progress) -> str:
    until_s = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < until_s:
        text = output.read_text(errors="replace")
        if match := re.search(r"Baton is ready at (\S+)/v1", text):
            return match[1]
        if process.poll() is not None:
            raise LabError(f"the fleet did not start:\n{text[-2000:]}")
        if match := re.search(r"waiting for (.+)\n$", text):
            progress.awaited = match[1]
        time.sleep(0.2)
    raise LabError(f"the fleet was not ready after {_START_LIMIT_S:.0f} s")


@contextlib.contextmanager
def awaiting(what: str, seconds: float | None = None) -> Iterator[Progress]:
    """Print what the lab waits for, and the rest of the seconds, every 5 s while the block runs."""
    progress = Progress(lambda line: echo(f"[dim]{escape(line)}[/]"))
    progress.awaited = what
    if seconds is not None:
        progress.until_s = time.monotonic() + seconds
    with progress.shown():
        yield progress


def _interrupt(number: int, frame: object) -> None:
    for each in (signal.SIGINT, *END_SIGNALS):  # the parent may forward what the terminal has sent
        signal.signal(each, lambda *_: None)  # Python reports SIG_IGN for one that has come
    raise KeyboardInterrupt


def main() -> None:
    """Run a lab in this process: read its context from standard input, and write its findings."""
    results = os.dup(1)
    os.dup2(2, 1)  # keep output of libraries apart from the findings
    for number in (signal.SIGINT, *END_SIGNALS):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    context = msgspec.json.decode(sys.stdin.buffer.read(), type=LabContext)
    try:
        with awaiting("the engine's libraries"):
            run = LABS[sys.argv[1]].load()
        findings = run(context)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    with os.fdopen(results, "wb") as out:
        out.write(msgspec.json.encode(findings))


if __name__ == "__main__":
    main()
