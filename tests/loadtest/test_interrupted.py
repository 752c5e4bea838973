"""Ctrl-C in long commands: what was done until then is kept and marked, with exit code 130.

SIGTERM and SIGHUP do the same.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from loadtest.commands.running import ended_by_signals
from tests.loadtest.simulator.test_simulator import SAMPLE


def interrupted(
    *arguments: str,
    sign: str = "",
    after_s: float = 0.0,
    number: int = signal.SIGINT,
    group: bool = True,  # a terminal sends it to the whole group
) -> tuple[str, str]:
    """Type a command, send a signal after a sign on standard error; return both outputs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fleet.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Tests that run in the background have SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    told = ""
    started: list[psutil.Process] = []
    try:
        while sign not in told:
            line = process.stderr.readline()
            assert line, told
            told += line
        time.sleep(after_s)
        started = psutil.Process(process.pid).children(recursive=True)
        (os.killpg if group else os.kill)(process.pid, number)
        out, more = process.communicate(timeout=60)
        assert psutil.wait_procs(started, timeout=5)[1] == []
    finally:
        process.kill()
        process.wait()
        for left in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
    assert process.returncode == 130, told + more
    return out, told + more


def test_a_signal_ends_a_command_once_even_where_sigint_is_ignored() -> None:
    found = signal.getsignal(signal.SIGTERM)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of a shell's background job
    ended = 0
    try:
        with ended_by_signals():
            try:
                signal.raise_signal(signal.SIGTERM)
            except KeyboardInterrupt:
                ended += 1
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == 1
    assert signal.getsignal(signal.SIGTERM) is found


def test_an_ignored_sighup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with ended_by_signals():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.timeout(120)
@pytest.mark.slow
@pytest.mark.parametrize(("number", "group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_simulation_has_the_figures_of_the_requests_so_far(number: int, group: bool) -> None:
    arguments = ("simulate", str(SAMPLE), "--limit", "1500", "--prefill", "4", "--decode", "4")
    arguments += ("--policy", "all", "--json")
    out, told = interrupted(
        *arguments, sign="simulated in", after_s=3.0, number=number, group=group
    )
    found = json.loads(out)
    for whole in found[:-1]:
        assert "left_out_requests" not in whole
        assert whole["figures"]["requests"] == 1500
    last = found[-1]
    assert last["left_out_requests"] > 0
    assert last["figures"]["requests"] + last["left_out_requests"] == 1500
    assert "PARTIAL" in told and "Traceback" not in told
