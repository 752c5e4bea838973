"""What a running fleet leaves on disk, so that `baton down` and the next `baton up` find it.

    ~/.local/state/baton/NAME/      (BATON_HOME or XDG_STATE_HOME move it)
        state.json                  who supervises, where, with which secrets; mode 0600
        lock                        held by the fleet's supervisor for as long as it lives
        workers.json                the router's last-known list of workers
        logs/                       unless `logs.dir` names another place
    /tmp/bt-XXXXXXXX/               sockets of Redis and Ray; gone after a stop

NAME is the fleet's name; a second fleet of the same file on another port gets NAME-PORT.
Processes of a fleet carry ``BATON_RUN_FOLDER`` in their environment: that is how leftovers of a
supervisor that was killed are told from everything else.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil

from baton.config.fleet_file import FleetConfig
from baton.config.network import TlsFiles
from baton.config.secrets import SecretError, read_tokens
from fleet.local.subprocesses import end_processes
from fleet.process_key import ProcessKey

RUN_FOLDER_VARIABLE = "BATON_RUN_FOLDER"
_PATH_VARIABLES = ("BATON_HOME", "XDG_STATE_HOME", "BATON_CACHE", "SSL_CERT_FILE")
_RUN_PREFIX = "bt-"
_LOCK_WAIT_S = 1.0  # `baton down` holds it for an instant


class FleetState(msgspec.Struct, frozen=True, kw_only=True):
    """One fleet that was started here."""

    name: str  # of its state folder
    fleet: str
    supervisor: ProcessKey
    run_folder: str
    url: str  # of the router
    redis_url: str  # holds a password
    log_dir: str
    config_file: str
    fleet_token: str = ""  # also the key of an operator, for `baton status`
    fleet_token_file: str = ""  # has the token of today
    certificate: str = ""  # of a router that speaks HTTPS
    tls: TlsFiles | None = None  # of what speaks to workers
    on_cluster: bool = False  # of another's Ray
    config_json: str = ""  # what runs, without the API keys
    keys_digest: str = ""  # of those
    changes_done: int = 0  # how often the file was read again
    change_problem: str = ""  # why it was not taken, the last time

    @property
    def running(self) -> bool:
        """Whether its supervisor is alive."""
        return self.supervisor.find() is not None


def home() -> Path:
    """The folder of all fleets' states."""
    if folder := os.environ.get("BATON_HOME"):
        return Path(folder)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "baton"


def state_folder(name: str) -> Path:
    """One fleet's folder; made if need be, for this user only."""
    folder = home() / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def log_folder(config: FleetConfig, name: str) -> Path:
    """Where a fleet's logs go."""
    folder = Path(config.logs.dir).expanduser() if config.logs.dir else None
    folder = folder or state_folder(name) / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def new_run_folder() -> Path:
    """A short-named folder: the paths of Unix sockets end at 107 characters."""
    return Path(tempfile.mkdtemp(prefix=_RUN_PREFIX, dir="/tmp"))


def enter(run_folder: Path) -> None:
    """Make a run folder the current one, of this process and of all that it starts.

    Python and Ray import from the current folder: in one of the user's, a file ``config.py`` would
    take the place of Baton's package ``config``. Variables that hold relative paths are made
    absolute first.
    """
    for name in _PATH_VARIABLES:
        if value := os.environ.get(name):
            os.environ[name] = str(Path(value).absolute())
    os.environ[RUN_FOLDER_VARIABLE] = str(run_folder)
    os.chdir(run_folder)
    # systemd-tmpfiles removes files that are unused for ten days, but not below a locked folder.
    # The descriptor stays open until this process ends.
    fcntl.flock(os.open(run_folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_SH)


class FleetLock:
    """The right to be the supervisor of a state folder, until `release` or the process's end.

    The kernel gives it back, however the process ends: no lock is left behind.

    Args:
        descriptor: Of the locked file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, name: str) -> "FleetLock | None":
        """Lock a fleet's state folder; None while another process holds it.

        Raises:
            OSError: The file system cannot lock; the message says what to do.
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
                    f"{file} cannot be locked ({error.strerror}): set BATON_HOME to a folder on a "
                    "local disk"
                ) from error
            else:
                return cls(descriptor)

    def release(self) -> None:
        """Let another process have it."""
        os.close(self._descriptor)


def save(state: FleetState) -> None:
    """Write a fleet's state, readable by this user only."""
    write_whole(state_folder(state.name) / "state.json", msgspec.json.encode(state))


def write_whole(file: Path, contents: bytes) -> None:
    """Write a file, readable by this user only, as a whole or not at all.

    Raises:
        OSError: It cannot be written; what was there before is still there.
    """
    scratch = file.with_name(f"{file.name}.new")
    scratch.unlink(missing_ok=True)
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(contents)
        stream.flush()
        os.fsync(descriptor)  # else a machine that loses its power has an empty file
    scratch.replace(file)


def load(name: str) -> FleetState | None:
    """A fleet's state, or None if it was never started or stopped cleanly."""
    try:
        found = msgspec.json.decode((home() / name / "state.json").read_bytes(), type=FleetState)
    except (OSError, msgspec.DecodeError):
        return None
    if found.fleet_token_file:  # it may have been replaced since
        with contextlib.suppress(SecretError):
            token = read_tokens(found.fleet_token_file)[0]
            found = msgspec.structs.replace(found, fleet_token=token)
    return found


def load_all() -> list[FleetState]:
    """The states of all fleets of this user."""
    names = sorted(path.parent.name for path in home().glob("*/state.json"))
    return [state for state in map(load, names) if state is not None]


def forget(name: str) -> None:
    """Remove the state of a fleet that is down and swept; for the holder of its lock alone."""
    (home() / name / "state.json").unlink(missing_ok=True)


def forget_unless_followed(state: FleetState) -> None:
    """Remove a fleet's state, unless another supervisor has taken its place meanwhile."""
    if (lock := FleetLock.take(state.name)) is None:
        return
    found = load(state.name)
    if found is not None and found.supervisor == state.supervisor:
        forget(state.name)
    lock.release()


def processes_of(run_folder: str) -> Iterator[psutil.Process]:
    """Live processes that belong to a run, whoever their parent is now; not this one."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(RUN_FOLDER_VARIABLE) == run_folder:
                yield process


def claim(name: str, say: Callable[[str], None]) -> FleetLock | None:
    """Take a state folder, after cleaning up what a killed run left behind.

    Args:
        name: Of the folder.
        say: Shows one line.

    Returns:
        The lock; None: another supervisor has the folder.
    """
    lock = FleetLock.take(name)
    earlier = load(name)
    if lock is not None and earlier is not None and earlier.running:  # it knows no lock yet
        lock.release()
        return None
    if lock is not None and earlier is not None:
        left = sweep(earlier.run_folder)
        forget(name)
        say(f"cleaned up after a run that was killed ({left} processes were left)")
    return lock


def sweep(run_folder: str, grace_s: float = 0.0) -> int:
    """End what is left of a run and remove its folder.

    Returns:
        How many processes were left.
    """
    left = list(processes_of(run_folder))
    end_processes(left, grace_s)
    late = list(processes_of(run_folder))  # born while the others died
    end_processes(late, 0.0)
    if Path(run_folder).name.startswith(_RUN_PREFIX):
        shutil.rmtree(run_folder, ignore_errors=True)
    return len(left) + len(late)
