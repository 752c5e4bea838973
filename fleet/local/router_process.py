"""The fleet's router process, and the socket that outlives it.

The supervisor binds the port and holds it: while a router that died is started again, connections
wait in the socket's backlog instead of being refused.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from fleet.local.preflight import claim_socket
from fleet.local.subprocesses import die_with_parent

RETIRE_SIGNAL = signal.SIGUSR1  # `router/__main__.py` hears it
_HEALTHY_S = 60.0


def own_address() -> str:
    """This host's address in the network that its default route leads to; loopback without one.

    Nothing is sent: the kernel is asked which address it would send from.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # of a network that is kept for documentation
        return str(probe.getsockname()[0])
    addresses = psutil.net_if_addrs().items()
    found = (a.address for _, several in addresses for a in several if a.family is socket.AF_INET)
    return next((address for address in found if not address.startswith("127.")), "127.0.0.1")


class RouterProcess:
    """One router after another, behind one listening socket.

    Args:
        host: Where to listen.
        port: 0 takes a free one.

    Raises:
        PortTakenError: Somebody else has the port.
    """

    def __init__(self, host: str, port: int) -> None:
        self._socket: socket.socket = claim_socket(host, port)
        self.port = int(self._socket.getsockname()[1])
        self.failures = 0  # deaths in a row
        self._process: subprocess.Popen[bytes] | None = None
        self._successor: subprocess.Popen[bytes] | None = None
        self._told = -1  # where the successor says that it listens
        self._retired: list[subprocess.Popen[bytes]] = []
        self._started_s = 0.0

    @property
    def pid(self) -> int:
        """Process id, 0 when it was never started."""
        return self._process.pid if self._process is not None else 0

    @property
    def ended(self) -> bool:
        """Whether it is not running. Those that have retired and ended are buried here."""
        self._retired = [process for process in self._retired if process.poll() is None]
        return self._process is None or self._process.poll() is not None

    @property
    def exit_code(self) -> int | None:
        """Of the life that ended."""
        return self._process.returncode if self._process is not None else None

    def start(self, config_file: Path, environment: Mapping[str, str], log_file: Path) -> None:
        """Start a life of it.

        Must be called from a thread that lives as long as the router shall.
        """
        self._process = self._spawn(config_file, environment, log_file)
        self._started_s = time.monotonic()

    @property
    def has_successor(self) -> bool:
        """Whether one is on its way."""
        return self._successor is not None

    def begin_succession(
        self, config_file: Path, environment: Mapping[str, str], log_file: Path
    ) -> None:
        """Start the life that shall follow, beside this one. Call `succession` until it is done."""
        self._told, told = os.pipe()
        try:
            self._successor = self._spawn(config_file, environment, log_file, told)
        finally:
            os.close(told)

    def succession(self) -> bool | None:
        """Whether the successor has taken over, or has ended instead; None: it is on its way.

        It takes over as soon as it listens, on the same socket; the earlier life then takes no new
        connections and ends with its last answer.
        """
        successor = self._successor
        if successor is None:
            return None
        listens = bool(select.select([self._told], [], [], 0)[0]) and bool(os.read(self._told, 1))
        if not listens and successor.poll() is None:
            return None
        os.close(self._told)
        self._successor = None
        if not listens:
            return False
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(RETIRE_SIGNAL)
            self._retired.append(self._process)
        self._process, self._started_s = successor, time.monotonic()
        return True

    def _spawn(
        self,
        config_file: Path,
        environment: Mapping[str, str],
        log_file: Path,
        told: int | None = None,
    ) -> "subprocess.Popen[bytes]":
        descriptor = self._socket.fileno()
        command = [sys.executable, "-m", "router", "--config", str(config_file)]
        command += ["--port", str(self.port), "--fd", str(descriptor)]
        inherited = [descriptor]
        if told is not None:
            command += ["--ready-fd", str(told)]
            inherited.append(told)
        with log_file.open("ab") as log:
            return subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=inherited,
                start_new_session=True,  # a terminal's Ctrl-C is for the supervisor alone
                preexec_fn=die_with_parent(),
            )

    def note_death(self) -> None:
        """Count a death; a long life before it forgives the earlier ones."""
        lived_s = time.monotonic() - self._started_s
        self.failures = 1 if lived_s > _HEALTHY_S else self.failures + 1

    def begin_stop(self) -> None:
        """Take no new connections; active requests have a moment left."""
        self._socket.close()
        for process in self._lives():
            process.terminate()

    def finish_stop(self, limit_s: float) -> None:
        """Wait for its end, or bring it about."""
        until_s = time.monotonic() + limit_s
        for process in self._lives():
            try:
                process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _lives(self) -> list["subprocess.Popen[bytes]"]:
        maybe = (self._process, self._successor)
        return [*self._retired, *(process for process in maybe if process is not None)]
