"""State of a running fleet on disk, for `baton down` and the next `baton up`.

    ~/.local/state/baton/NAME/      (moved by BATON_HOME or XDG_STATE_HOME)
        state.json                  supervisor, URLs and secrets; mode 0600
        lock                        held by the fleet's supervisor until it ends
        workers.json                the router's last-known list of workers
        audit.jsonl                 audit log; mode 0600
        keys.json                   issued API keys, hashes only; mode 0600
        logs/                       unless `logs.dir` is set
    /tmp/bt-XXXXXXXX/               sockets of Redis and Ray; removed by a stop

NAME is the fleet's name; a second fleet of the same file on another port gets NAME-PORT. All
processes of a fleet have ``BATON_RUN_FOLDER`` in their environment, which identifies the leftovers
of a killed supervisor.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import psutil

from baton.config.fleet_file import FleetConfig
from baton.config.network import TlsFiles
from baton.config.secrets import SecretError, read_tokens
from baton.folders import home_folder, make_private, replace_file
from baton.tenants.audit import file as audit
from fleet.local.subprocesses import end_processes
from fleet.process_key import ProcessKey

RUN_FOLDER_VARIABLE = "BATON_RUN_FOLDER"
_PATH_VARIABLES = ("BATON_HOME", "XDG_STATE_HOME", "BATON_CACHE", "SSL_CERT_FILE")
_RUN_PREFIX = "bt-"
_LOCK_WAIT_S = 1.0  # `baton down` holds the lock for a moment


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    """State of one fleet that was started on this machine."""

    name: str  # of its state folder
    fleet: str
    supervisor: ProcessKey
    run_folder: str
    url: str  # of the router
    redis_url: str  # holds a password
    log_dir: str
    config_file: str
    fleet_token: str = ""  # also an operator key, for `baton status`
    fleet_token_file: str = ""  # has the current token
    certificate: str = ""  # of a router with HTTPS
    tls: TlsFiles | None = None  # for connections to workers
    on_cluster: bool = False  # on an existing Ray cluster
    config_json: str = ""  # running configuration, without API keys
    keys_digest: str = ""  # of the API keys
    changes_done: int = 0  # how often the file was reread
    change_problem: str = ""  # why the last change failed
    rolls_failed: int = 0  # how often new routers were given up
    roll_problem: str = ""  # why, the last time
    change_awaits: str = ""  # what a change of the file in progress waits for

    @property
    def running(self) -> bool:
        """Return whether the supervisor is alive."""
        return self.supervisor.find() is not None


def home() -> Path:
    """Return the folder of all fleets' states."""
    if folder := os.environ.get("BATON_HOME"):
        return Path(folder)
    base = os.environ.get("XDG_STATE_HOME") or home_folder() / ".local" / "state"
    return Path(base) / "baton"


def state_folder(name: str) -> Path:
    """Return one fleet's folder, which is private to this user."""
    folder = home() / name
    try:
        make_private(folder)
    except OSError as error:
        raise OSError(
            f"cannot make {folder} ({error.strerror}): set BATON_HOME to a folder that this user "
            "can write"
        ) from error
    return folder


def audit_file(name: str) -> Path:
    """Return the path of a fleet's audit log."""
    return state_folder(name) / audit.NAME


def log_folder(config: FleetConfig, name: str) -> Path:
    """Return the folder of a fleet's logs, which is made if needed."""
    folder = Path(config.logs.dir).expanduser() if config.logs.dir else None
    folder = folder or state_folder(name) / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def new_run_folder() -> Path:
    """Make a folder with a short path: Unix sockets' paths have at most 107 characters."""
    return Path(tempfile.mkdtemp(prefix=_RUN_PREFIX, dir="/tmp"))


def enter(run_folder: Path) -> None:
    """Make a run folder the current folder of this process and its children.

    Python and Ray import from the current folder, where the user's files could shadow modules.
    Environment variables with relative paths are made absolute first.
    """
    for name in _PATH_VARIABLES:
        if value := os.environ.get(name):
            os.environ[name] = str(Path(value).absolute())
    os.environ[RUN_FOLDER_VARIABLE] = str(run_folder)
    os.chdir(run_folder)
    # systemd-tmpfiles removes files after ten unused days, but not in a locked folder.
    # The descriptor stays open until this process ends.
    fcntl.flock(os.open(run_folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_SH)


class FleetLock:
    """Lock of a state folder, held by its supervisor until `release` or the process's end.

    The kernel releases it however the process ends.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, name: str) -> "FleetLock | None":
        """Lock a fleet's state folder; return None if another process holds the lock.

        Raises:
            OSError: The file system does not support locks.
        """
        file = state_folder(name) / "lock"
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(descriptor)
                    return None
                time.sleep(0.02)
            except OSError as error:
                os.close(descriptor)
                raise OSError(
                    f"cannot lock {file} ({error.strerror}): set BATON_HOME to a folder on a local "
                    "disk"
                ) from error
            else:
                return cls(descriptor)

    def release(self) -> None:
        """Release the lock for another process."""
        os.close(self._descriptor)


def save(state: FleetState) -> None:
    """Write a fleet's state, readable by this user only."""
    file = state_folder(state.name) / "state.json"
    replace_file(file, msgspec.json.encode(state), durable=True)


def load(name: str) -> FleetState | None:
    """Return a fleet's state; None if it was never started, or stopped cleanly."""
    try:
        state = msgspec.json.decode((home() / name / "state.json").read_bytes(), type=FleetState)
    except (OSError, msgspec.DecodeError):
        return None
    if state.fleet_token_file:  # the token may have been rotated since
        with contextlib.suppress(SecretError):
            token = read_tokens(state.fleet_token_file)[0]
            state = msgspec.structs.replace(state, fleet_token=token)
    return state


def load_all() -> list[FleetState]:
    """Return the states of all fleets of this user."""
    names = sorted(path.parent.name for path in home().glob("*/state.json"))
    return [state for state in map(load, names) if state is not None]


def forget(name: str) -> None:
    """Remove a stopped fleet's state. Only the holder of its lock may call this."""
    (home() / name / "state.json").unlink(missing_ok=True)


def forget_unless_followed(state: FleetState) -> None:
    """Remove a fleet's state, unless another supervisor has started it since."""
    if (lock := FleetLock.take(state.name)) is None:
        return
    present = load(state.name)
    if present is not None and present.supervisor == state.supervisor:
        forget(state.name)
    lock.release()


def processes_of(run_folder: str) -> Iterator[psutil.Process]:
    """Yield the live processes of a run, by their environment; not this process."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(RUN_FOLDER_VARIABLE) == run_folder:
                yield process


def claim(name: str, say: Callable[[str], None]) -> FleetLock | None:
    """Lock a state folder, and clean up after a run that was killed.

    Returns:
        The lock; None if another supervisor has the folder.
    """
    lock = FleetLock.take(name)
    earlier = load(name)
    if lock is None or earlier is None:
        return lock
    if earlier.running:  # a version without locks
        lock.release()
        return None
    left = sweep(earlier.run_folder)
    forget(name)
    say(f"cleaned up after a killed run ({left} leftover processes ended)")
    return lock


def claim_first(names: Sequence[str], say: Callable[[str], None]) -> tuple[str, FleetLock | None]:
    """Lock the first free state folder; return the last one without a lock if none is."""
    for name in names:
        if (lock := claim(name, say)) is not None:
            return name, lock
    return names[-1], None


def sweep(run_folder: str, grace_s: float = 0.0) -> int:
    """End the leftover processes of a run, remove its folder, and return their number."""
    left = list(processes_of(run_folder))
    end_processes(left, grace_s)
    late = list(processes_of(run_folder))  # started while the others were ended
    end_processes(late, 0.0)
    if Path(run_folder).name.startswith(_RUN_PREFIX):
        shutil.rmtree(run_folder, ignore_errors=True)
    return len(left) + len(late)
