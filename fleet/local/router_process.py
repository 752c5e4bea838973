"""The fleet's router processes, and the listening sockets that outlive them.

    port ─┬─ socket 0 ── router 0 ─┐   each inherits all sockets, accepts from its own,
          ├─ socket 1 ── router 1 ─┤   and from that of a router that is down
          └─ socket 2 ── router 2 ─┘   (`router.frontend.group.siblings`)

The supervisor binds the port and keeps it. While a dead router restarts, connections wait in the
backlog or are accepted by other routers; none is refused.
"""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from baton.addresses import join_address
from fleet.local.checks.preflight import BACKLOG, claim_socket
from fleet.local.subprocesses import die_with_parent, end_child
from fleet.pools.resources import exit_reason
from fleet.private_logs import open_log
from router.frontend.group.member import alive_path

_HEALTHY_S = 60.0
_FAILURES = 5  # in a row, of one router
_START_LIMIT_S = 60.0
_LOOK_COUNTS_S = 5.0
_SPAWN_PAUSE_S = 5.0
_LOOK_DRAINED_S = 0.1
# gRPC's handlers may crash a child between fork and exec, such as the process that checks grammars
_NO_FORK_HANDLERS = {"GRPC_ENABLE_FORK_SUPPORT": "0"}
_ANY_HOST = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound


def own_address(*, version6: bool = False) -> str:
    """Return this host's address on the network of its default route; loopback without a network.

    Sends nothing: the kernel only looks up the source address.
    """
    family = socket.AF_INET6 if version6 else socket.AF_INET
    elsewhere = "2001:db8::1" if version6 else "192.0.2.1"  # documentation addresses
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((elsewhere, 9))
        return str(probe.getsockname()[0])
    addresses = psutil.net_if_addrs().items()
    own = (a.address for _, several in addresses for a in several if a.family is family)
    loopback = "::1" if version6 else "127.0.0.1"
    inner = ("127.", "::1", "fe80:")  # unreachable from other hosts
    return next((address for address in own if not address.startswith(inner)), loopback)


def url_of(scheme: str, host: str, port: int, *, elsewhere: bool = False) -> str:
    """Return the URL of routers that listen on ``host``, for clients here or ``elsewhere``.

    A wildcard address becomes loopback or this host's address.
    """
    if host in _ANY_HOST:
        version6 = host == "::"  # which accepts no IPv4
        loopback = "::1" if version6 else "127.0.0.1"
        host = own_address(version6=version6) if elsewhere else loopback
    return f"{scheme}://{join_address(host, port)}"


def listening_sockets(host: str, port: int, count: int) -> list[socket.socket]:
    """Return ``count`` sockets of one port, over which the kernel distributes connections.

    Returns a single socket if the kernel cannot do that; then all routers accept from it, and an
    idle router may get more than its share.
    """
    held = claim_socket(host, port)  # now no other process can have the port
    if count == 1 or not hasattr(socket, "SO_REUSEPORT"):
        return [held]
    address = held.getsockname()
    sockets = [held]
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sockets.extend(
            socket.create_server(address, family=held.family, backlog=BACKLOG, reuse_port=True)
            for _ in range(count - 1)
        )
    except OSError:
        for listener in sockets[1:]:
            listener.close()
        return [held]
    return sockets


class _Life:
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self.started_s = time.monotonic()
        self.looked_at_s = self.started_s
        self.awaited_s = 0.0

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def is_late(self, now_s: float) -> bool:
        """Return whether it was looked at for `_START_LIMIT_S` since its start.

        A standstill counts as one look: the router stood still too.
        """
        self.awaited_s += min(now_s - self.looked_at_s, _LOOK_COUNTS_S)
        self.looked_at_s = now_s
        return self.awaited_s > _START_LIMIT_S


class RouterFailedError(RuntimeError):
    """A router keeps dying; the message has its name and exit code."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


class RouterProcesses:
    """Routers behind one port, each restarted when it dies.

    All methods must be called from one thread, which must outlive the routers. Port 0 stands for a
    free one.
    """

    def __init__(self, host: str, port: int, count: int = 1) -> None:
        self._sockets = listening_sockets(host, port, count)
        self.port = int(self._sockets[0].getsockname()[1])
        self.count = count
        self._lives: list[_Life | None] = [None] * count
        self._failures = [0] * count  # deaths in a row
        self._start_at_s = [0.0] * count
        self._leaving: list[_Life] = []
        self._to_replace: list[int] = []
        self.roll_failed = ""  # why the last rolling restart was aborted
        self._next: _Life | None = None  # successor of the first router in _to_replace
        self._launch: Callable[[int], subprocess.Popen[bytes]] | None = None
        self._group = Path()

    @property
    def pids(self) -> list[int]:
        """Return the process id of each router; 0 if it was never started."""
        return [life.process.pid if life is not None else 0 for life in self._lives]

    @property
    def exit_codes(self) -> list[int | None]:
        """Return the exit code of each router; None while it runs."""
        return [life.process.poll() if life is not None else None for life in self._lives]

    @property
    def rolled(self) -> bool:
        """Return whether the rolling restart is over."""
        return not self._to_replace

    @property
    def settled(self) -> bool:
        """Return whether the rolling restart is over and no replaced router is still running."""
        return not (self._to_replace or self._leaving)

    def start(
        self, config_file: Path, environment: Mapping[str, str], group: Path, logs: Path
    ) -> None:
        """Start all routers; the environment has the secrets.

        ``group`` becomes a private folder of the sockets over which the routers communicate.
        """
        group.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._group = group
        descriptors = [each.fileno() for each in self._sockets]
        options = ["--port", str(self.port), *(f"--fd={number}" for number in descriptors)]
        options += ["--group", str(group), "--routers", str(self.count)]
        command = [sys.executable, "-P", "-m", "router", "--config", str(config_file), *options]

        def launch(index: int) -> "subprocess.Popen[bytes]":
            with open_log(logs / f"{log_name(index)}.log") as log:
                return subprocess.Popen(
                    [*command, "--index", str(index)],
                    env={**environment, **_NO_FORK_HANDLERS},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=descriptors,
                    start_new_session=True,  # Ctrl-C in a terminal must reach only the supervisor
                    preexec_fn=die_with_parent(),
                )

        self._launch = launch
        for index in range(self.count):
            self._lives[index] = self._new_life(index)

    def _new_life(self, index: int) -> _Life | None:
        return _Life(self._launch(index)) if self._launch is not None else None

    def keep(self, say: Callable[[str], None]) -> None:
        """Restart dead routers and continue a rolling restart. Call often.

        A router restarts at once, or after a pause that grows with its deaths in a row.

        Raises:
            RouterFailedError: A router died too often.
        """
        now_s = time.monotonic()
        for index, life in enumerate(self._lives):
            if life is not None and life.ended:
                self._note_death(index, life, now_s)
                cause = exit_reason(life.process.returncode)
                say(f"{router_name(index)} died ({cause}); restarting it")
                self._lives[index] = None
            is_due = self._launch is not None and now_s >= self._start_at_s[index]
            if self._lives[index] is None and is_due:
                self._begin_again(index, now_s, say)
        self._leaving = [life for life in self._leaving if not life.ended]
        self._replace(say)

    def _begin_again(self, index: int, now_s: float, say: Callable[[str], None]) -> None:
        try:
            self._lives[index] = self._new_life(index)
        except OSError as error:  # out of memory, descriptors or disk space: temporary
            self._start_at_s[index] = now_s + _SPAWN_PAUSE_S
            say(f"cannot start {router_name(index)} ({error}); retrying in {_SPAWN_PAUSE_S:g} s")

    def _note_death(self, index: int, life: _Life, now_s: float) -> None:
        healthy = now_s - life.started_s > _HEALTHY_S
        self._failures[index] = failures = 1 if healthy else self._failures[index] + 1
        if failures > _FAILURES:
            cause = exit_reason(life.process.returncode)
            raise RouterFailedError(
                f"{router_name(index)} died {failures} times ({cause})", log_name(index)
            )
        self._start_at_s[index] = now_s + 0.2 * (failures - 1)

    def roll(self) -> None:
        """Replace all routers one by one; each successor serves before its predecessor stops.

        A router that is being replaced now is replaced again: its successor may have read an older
        file.
        """
        self.roll_failed = ""
        waiting = self._to_replace if self._next is None else self._to_replace[1:]
        self._to_replace += [index for index in range(self.count) if index not in waiting]

    def _replace(self, say: Callable[[str], None]) -> None:
        if not self._to_replace:
            return
        index = self._to_replace[0]
        if self._next is None:
            try:
                self._next = self._new_life(index)
            except OSError as error:
                self._break_off(
                    f"cannot start the successor of {router_name(index)} ({error})", say
                )
            return
        if self.serving(index) == self._next.process.pid:
            last = self._lives[index]
            self._lives[index] = self._next
            if last is not None and not last.ended:
                last.process.send_signal(signal.SIGUSR1)
                self._leaving.append(last)
            say(f"{router_name(index)} was replaced; the old process finishes its responses")
        elif self._next.is_late(time.monotonic()) or self._next.ended:
            end_child(self._next.process, 0.0)
            self._next = None
            self._break_off(f"the successor of {router_name(index)} does not serve", say)
            return
        else:
            return
        self._to_replace.pop(0)
        self._next = None

    def _break_off(self, why: str, say: Callable[[str], None]) -> None:
        say(f"{why}; keeping the present routers")
        self._to_replace.clear()
        self.roll_failed = why

    def serving(self, index: int) -> int:
        """Return the process id of the router that serves with this index; 0 if none does."""
        return serving_pid(self._group, index)

    def drain(self, is_hurried: Callable[[], bool]) -> None:
        """Let requests of gateways end, which a stop of their endpoint picker would cut."""
        for life in self._all():
            life.process.send_signal(signal.SIGUSR1)
        while not (is_hurried() or all(life.ended for life in self._all())):
            time.sleep(_LOOK_DRAINED_S)

    def begin_stop(self) -> None:
        """Stop accepting connections; active requests get until `finish_stop`'s limit."""
        for each in self._sockets:
            each.close()
        for life in self._all():
            if not life.ended:
                life.process.terminate()

    def finish_stop(self, limit_s: float) -> None:
        """Wait for all routers, and kill those that exceed the limit."""
        until_s = time.monotonic() + limit_s
        for life in self._all():
            end_child(life.process, max(until_s - time.monotonic(), 0.0))

    def _all(self) -> Sequence[_Life]:
        lives = (*self._lives, self._next, *self._leaving)
        return [life for life in lives if life is not None]


def group_folder(run_folder: Path) -> Path:
    """Return the folder of the sockets over which a fleet's routers communicate."""
    return run_folder / "routers"


def serving_pid(group: Path, index: int) -> int:
    """Return the process id of the router that serves with this index; 0 if none does."""
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(1.0)
        asked.connect(str(alive_path(group, index)))
        return int(asked.makefile("rb").readline())
    return 0


def log_name(index: int) -> str:
    """Return the name of a router's log file, without its suffix."""
    return f"router-{index}" if index else "router"


def router_name(index: int) -> str:
    """Return the name of a router in messages."""
    return f"router {index}" if index else "the router"
