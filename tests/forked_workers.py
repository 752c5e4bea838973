"""Test processes that are forked from one that has imported the tests, for xdist.

Imports take three quarters of the CPU time before the first test, in each process of a run.
"""

import atexit
import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from execnet import gateway_io


class ForkedProcess:
    """What execnet needs of a `Popen`: a process that runs what its standard input says."""

    def __init__(self, earlier: list["ForkedProcess"]) -> None:
        their_input, our_output = os.pipe()
        our_input, their_output = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            ours = [our_output, our_input]
            ours += [file.fileno() for each in earlier for file in (each.stdin, each.stdout)]
            _serve(their_input, their_output, ours)
        os.close(their_input)
        os.close(their_output)
        self.stdin = os.fdopen(our_output, "wb")
        self.stdout = os.fdopen(our_input, "rb")

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _serve(standard_input: int, standard_output: int, ours: list[int]) -> None:
    """Run the first line of the standard input, as execnet's own command does; then end."""
    for number in ours:
        os.close(number)
    os.dup2(standard_input, 0)
    os.dup2(standard_output, 1)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    try:
        exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        os._exit(0)


def import_tests(config: pytest.Config) -> None:
    """Import the selected test modules, under the names that pytest finds them by."""
    for path in sorted(_files(config)):
        name = ".".join(path.relative_to(config.rootpath).with_suffix("").parts)
        with contextlib.suppress(BaseException):  # the test processes report it
            importlib.import_module(name)


def _files(config: pytest.Config) -> Iterator[Path]:
    for argument in config.args:
        path = config.invocation_params.dir / argument.partition("::")[0]
        yield from path.rglob("test_*.py") if path.is_dir() else [path]


def fork(config: pytest.Config, count: int) -> None:
    """Fork so many processes, which execnet takes in place of those that it would start."""
    import_tests(config)
    processes: list[ForkedProcess] = []
    for _ in range(count):
        processes.append(ForkedProcess(processes))
    start = gateway_io.create_io

    def take(spec: Any, execmodel: Any) -> Any:
        if not processes or not spec.popen or spec.python:
            return start(spec, execmodel)
        process = processes.pop(0)
        io = gateway_io.Popen2IOMaster.__new__(gateway_io.Popen2IOMaster)
        gateway_io.Popen2IO.__init__(io, process.stdin, process.stdout, execmodel)
        io.popen = process
        return io

    gateway_io.create_io = take
