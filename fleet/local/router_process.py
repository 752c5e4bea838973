"""The fleet's router process, and the socket that outlives it.

The supervisor binds the port and holds it: while a router that died is started again, connections
wait in the socket's backlog instead of being refused.
"""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from fleet.local.preflight import claim_socket
from fleet.local.subprocesses import die_with_parent

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
        self._started_s = 0.0

    @property
    def pid(self) -> int:
        """Process id, 0 when it was never started."""
        return self._process.pid if self._process is not None else 0

    @property
    def ended(self) -> bool:
        """Whether it is not running."""
        return self._process is None or self._process.poll() is not None

    @property
    def exit_code(self) -> int | None:
        """Of the life that ended."""
        return self._process.returncode if self._process is not None else None

    def start(self, config_file: Path, environment: Mapping[str, str], log_file: Path) -> None:
        """Start a life of it.

        Must be called from a thread that lives as long as the router shall.
        """
        descriptor = self._socket.fileno()
        command = [sys.executable, "-m", "router", "--config", str(config_file)]
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port), "--fd", str(descriptor)],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(descriptor,),
                start_new_session=True,  # a terminal's Ctrl-C is for the supervisor alone
                preexec_fn=die_with_parent(),
            )
        self._started_s = time.monotonic()

    def note_death(self) -> None:
        """Count a death; a long life before it forgives the earlier ones."""
        lived_s = time.monotonic() - self._started_s
        self.failures = 1 if lived_s > _HEALTHY_S else self.failures + 1

    def begin_stop(self) -> None:
        """Take no new connections; active requests have a moment left."""
        self._socket.close()
        if self._process is not None:
            self._process.terminate()

    def finish_stop(self, limit_s: float) -> None:
        """Wait for its end, or bring it about."""
        if self._process is None:
            return
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
