"""Where a lab runs: an engine in a process of its own, or a fleet that is there or is started."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from loadtest.commands.options import FindFleet, say
from loadtest.lab.results import Findings
from loadtest.lab.table import LABS, LabContext

_START_LIMIT_S = 600.0
_STOP_LIMIT_S = 30.0


class PlaceError(RuntimeError):
    """A lab cannot be held; the text says why."""


def machine() -> str:
    """The processor and its cores."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"model name\s*: (.*)", text)
    return f"{found[1] if found else 'unknown processor'}, {os.cpu_count()} cores"


def in_own_process(name: str, context: LabContext) -> Findings:
    """Run an engine's lab in a fresh process, its threads set before torch is imported.

    Raises:
        PlaceError: It failed; what it said stands on standard error.
    """
    threads = str(context.threads)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", "loadtest.lab.places", name],
        input=msgspec.json.encode(context),
        stdout=subprocess.PIPE,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise PlaceError(f"the lab's process ended with exit code {done.returncode}")
    return msgspec.json.decode(done.stdout, type=Findings)


@contextlib.contextmanager
def fleet_of(
    url: str, fleet_file: Path | None, find_fleet: FindFleet | None, context: LabContext
) -> Iterator[LabContext]:
    """The context with a fleet's address: the one named, the one of the file, or the local one.

    Raises:
        PlaceError: There is none, or it does not start.
    """
    if fleet_file is not None and not url:
        with _started(fleet_file) as started:
            yield msgspec.structs.replace(context, url=started)
        return
    local = find_fleet() if find_fleet is not None and not url else None
    if local is not None:
        key = context.api_key or local.operator_key
        yield msgspec.structs.replace(context, url=local.url, api_key=key)
        return
    if not url:
        raise PlaceError("this lab asks a fleet: give --url or --fleet FILE, or `baton up` first")
    yield msgspec.structs.replace(context, url=url.rstrip("/").removesuffix("/v1"))


@contextlib.contextmanager
def _started(file: Path) -> Iterator[str]:
    """The URL of a fleet of that file, which ends with the lab."""
    say(f"[dim]starting a fleet of {file}[/]")
    with tempfile.TemporaryDirectory(prefix="baton-lab-") as home:
        output = Path(home) / "output"
        with output.open("wb") as told:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fleet.cli.main", "up", str(file)],
                env={**os.environ, "BATON_HOME": home, "BATON_PORT": "0"},
                stdout=told,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield _wait_ready(process, output)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(process: "subprocess.Popen[bytes]", output: Path) -> str:
    until_s = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < until_s:
        text = output.read_text(errors="replace")
        if found := re.search(r"Baton is ready at (\S+)/v1", text):
            return found[1]
        if process.poll() is not None:
            raise PlaceError(f"the fleet did not start:\n{text[-2000:]}")
        time.sleep(0.2)
    raise PlaceError(f"the fleet was not ready after {_START_LIMIT_S:.0f} s")


def main() -> None:
    """Entry of the lab's process: the context as JSON comes in, the findings go out."""
    results = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints is not the findings
    context = msgspec.json.decode(sys.stdin.buffer.read(), type=LabContext)
    findings = LABS[sys.argv[1]].run(context)
    with os.fdopen(results, "wb") as out:
        out.write(msgspec.json.encode(findings))


if __name__ == "__main__":
    main()
