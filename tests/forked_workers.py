"""Test processes of xdist, forked from one that has imported the libraries.

These imports are most of the CPU time of a test process before its first test. No test module is
imported before: some compute, and a process forked after that never ends torch's parallel regions.
"""

import atexit
import importlib
import os
import signal
import sys
import threading
from typing import Any

from execnet import gateway_io

LIBRARIES = ("anthropic", "fastapi", "openai", "torch", "transformers", "router.app")


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


def fork(count: int) -> None:
    """Fork so many processes, which execnet takes in place of those that it would start."""
    for library in LIBRARIES:
        importlib.import_module(library)
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
