"""Start programs in processes of their own, forked from a server that has their imports.

Imports take two thirds of the CPU time of a worker's start, and the tests start hundreds.
"""

import asyncio
import multiprocessing
import os
import runpy
import signal
import sys
from multiprocessing.connection import Connection

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["fleet.worker.worker"])


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
