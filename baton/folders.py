"""Folders of this user that outlive a process, and files that an operator names."""

import contextlib
import errno
import os
import stat
import tempfile
from functools import cache
from pathlib import Path

_MOST_BYTES = 16 << 20


class NoHomeError(OSError):
    """The user has no home folder; the message names the variable to set."""


def home_folder() -> Path:
    """Return the user's home folder.

    Raises:
        NoHomeError: Neither HOME nor the user database has one.
    """
    try:
        return Path.home()
    except RuntimeError as error:
        raise NoHomeError(
            f"user {os.getuid()} has no home folder: set BATON_HOME to a folder that this user can "
            "write"
        ) from error


def cache_root() -> Path:
    """Return the folder of reproducible files; a temporary one where the home cannot be written."""
    if named := os.environ.get("BATON_CACHE"):
        return Path(named)
    with contextlib.suppress(NoHomeError):
        folder = home_folder() / ".cache" / "baton"
        nearest = next(one for one in (folder, *folder.parents) if one.exists())
        if os.access(nearest, os.W_OK | os.X_OK):
            return folder
    return _temporary()


def make_private(folder: Path) -> None:
    """Create a folder if needed, and close one that was made otherwise to other users."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)


def read_small(file: str | Path, *, piped: bool = False) -> bytes:
    """Return the contents of a file of settings, which may be a pipe if ``piped``.

    Raises:
        OSError: It cannot be read, is a device or a pipe, which may never end, or is too large.
    """
    if not (piped or stat.S_ISREG(Path(file).stat().st_mode)):
        raise OSError(errno.EINVAL, "it must be a regular file", str(file))
    with Path(file).open("rb") as stream:
        contents = stream.read(_MOST_BYTES + 1)
    if len(contents) > _MOST_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {_MOST_BYTES} bytes", str(file))
    return contents


def replace_file(file: Path, contents: bytes, *, durable: bool = False) -> None:
    """Replace a file at once by one that only this user may read.

    ``durable`` waits for the disk: else a power failure can leave an empty file.

    Raises:
        OSError: It cannot be written; the previous content is unchanged.
    """
    descriptor, scratch = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(contents)
            if durable:
                stream.flush()
                os.fsync(descriptor)
        Path(scratch).replace(file)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


@cache
def _temporary() -> Path:
    """Return this user's folder in /tmp, or a new one where others may have made or changed it."""
    folder = Path(tempfile.gettempdir(), f"baton-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    ours = about.st_uid == os.getuid() and stat.S_ISDIR(about.st_mode)
    if ours and not about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return folder
    return Path(tempfile.mkdtemp(prefix="baton-"))
