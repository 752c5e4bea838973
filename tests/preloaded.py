"""Start programs in processes of their own, forked from a server that has their imports.

Imports take two thirds of the CPU time of a worker's or a rank's start, and the tests start
hundreds.
"""

import asyncio
import fcntl
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["fleet.worker.worker"])
_RANK = "baton.engine.cpu.parallel.rank"


class PreloadedProcess:
    """Process that runs ``python -m MODULE``, with the methods of ``asyncio``'s that tests use."""

    def __init__(
        self,
        process: multiprocessing.Process,
        stdout: asyncio.StreamReader,
        pipe: asyncio.Transport,
    ) -> None:
        self.stdout = stdout
        self.pid = process.pid
        self._process = process
        self._pipe = pipe

    @classmethod
    async def start(cls, module: str, standard_input: bytes) -> "PreloadedProcess":
        """Start the program; its standard error is dropped."""
        reader, writer = os.pipe()
        with Connection(writer, readable=False) as output:
            arguments = (module, standard_input, dict(os.environ), output)
            process = _SERVER.Process(target=_run, args=arguments, daemon=True)
            process.start()
        stdout = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(stdout)
        loop = asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(reader, "rb"))
        return cls(process, stdout, pipe)

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        return self._process.exitcode

    async def wait(self) -> int:
        """Wait until the process has ended and return its exit status."""
        loop = asyncio.get_running_loop()
        while self._process.exitcode is None:
            ended = asyncio.Event()
            loop.add_reader(self._process.sentinel, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(self._process.sentinel)
        self._pipe.close()
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal; an ended process gets none."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(
    module: str, standard_input: bytes, environment: dict[str, str], output: Connection
) -> None:
    """Run a program in a forked process."""
    os.environ.clear()
    os.environ.update(environment)
    given = os.memfd_create("standard input")
    os.write(given, standard_input)
    os.lseek(given, 0, os.SEEK_SET)
    for file, number in ((given, 0), (output.fileno(), 1), (os.open(os.devnull, os.O_WRONLY), 2)):
        os.dup2(file, number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


@contextmanager
def preloaded_ranks() -> Iterator[None]:
    """Start the ranks of a replica from the server: each would import torch."""
    _SERVER.set_forkserver_preload(["fleet.worker.worker", _RANK])
    with mock.patch(f"{_RANK}_processes.subprocess", SimpleNamespace(Popen=_Rank)):
        yield


class _Rank(_SERVER.Process):
    """Process of ``python -P -m MODULE ARGUMENTS``, with the methods of `Popen` that are used."""

    def __init__(self, command: Sequence[str], pass_fds: Sequence[int]) -> None:
        module, *arguments = command[command.index("-m") + 1 :]
        given = (module, arguments, Path.cwd(), dict(os.environ), _Descriptors(pass_fds))
        super().__init__(target=_run_rank, args=given, daemon=True)
        self.start()

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> int | None:
        self.join()
        return self.exitcode


class _Descriptors:
    """Descriptors that have the same numbers in the process that gets them."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers

    def __reduce__(self) -> tuple[object, ...]:
        return _take, ([(number, reduction.DupFd(number)) for number in self._numbers],)


def _take(pairs: list[tuple[int, "reduction.DupFd"]]) -> list[int]:
    numbers = [number for number, _ in pairs]
    away = max(numbers) + 1
    moved = [fcntl.fcntl(copy.detach(), fcntl.F_DUPFD, away) for _, copy in pairs]
    for number, copy in zip(numbers, moved, strict=True):
        os.dup2(copy, number)
        os.close(copy)
    return numbers


def _run_rank(
    module: str, arguments: list[str], folder: Path, environment: dict[str, str], _: list[int]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
