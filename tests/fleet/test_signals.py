"""A stop is heard from a signal, and from make, which keeps a SIGINT to itself."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleet.local.signals import CHANGE_SIGNAL

PROGRAM = """
from fleet.local.signals import StopRequestedError, StopSignal
import sys, time
stop = StopSignal()
stop.install()
stop.watch_make()
try:
    print("up", flush=True)
    if "starting" in sys.argv:
        time.sleep(30)
    stop.starting_done()
    print("heard" if stop.wait(30) else "nothing", flush=True)
except StopRequestedError:
    print("interrupted", flush=True)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    (tmp_path / "Makefile").write_text(f"serve:\n\t@exec {sys.executable} {file}\n")
    return file


def test_a_changed_file_is_no_stop(program: Path) -> None:
    program.write_text(
        PROGRAM + "print(stop.take_change(), stop.take_change(), stop.is_set, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(CHANGE_SIGNAL)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read().endswith("\nTrue False True\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("when", "said"), [("up", "heard"), ("starting", "interrupted")])
def test_a_signal_ends_waiting_and_starting(
    program: Path, number: signal.Signals, when: str, said: str
) -> None:
    command = [sys.executable, str(program), when]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        time.sleep(0.1)
        process.send_signal(number)
        assert process.stdout.readline() == f"{said}\n"


def _ignores_hangups() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def test_a_fleet_that_was_started_with_nohup_outlives_its_terminal(program: Path) -> None:
    with subprocess.Popen(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_ignores_hangups,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "heard\n"


def _hears_interrupts() -> None:
    """A background job of a script, as CI may be one, has inherited that they are ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_make_alone_is_heard(program: Path, number: signal.Signals) -> None:
    command = ["make", "-C", str(program.parent), "--no-print-directory", "serve"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=_hears_interrupts,
    ) as make:
        assert make.stdout is not None
        assert make.stdout.readline() == "up\n"
        time.sleep(0.5)
        began = time.monotonic()
        make.send_signal(number)
        assert make.stdout.readline() == "heard\n"
        assert time.monotonic() - began < 2
