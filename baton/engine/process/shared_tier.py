"""Blocks of other workers in the folder that the disk tiers of a fleet share.

    FLEET/decode-0/KEY/HASH.kv    of this worker, which alone writes and evicts them
    FLEET/decode-1/KEY/HASH.kv    of another one; here they are only read

As each file has one owner, workers need no lock. A file that its owner has removed is a miss.
A folder is listed again when its time of modification changes, as on all POSIX file systems.
"""

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

_LOG = logging.getLogger(__name__)

SUFFIX = ".kv"
NAME = re.compile(r"[0-9a-f]{32}" + re.escape(SUFFIX))
"""Name of a complete file: its block hash."""

_LOOK_S = 1.0  # at least the granularity of times of modification
_PAUSES = 50  # least time between two looks, in durations of the last one
_LAST_LOOK_S = 2.0


class OtherBlocks(NamedTuple):
    """Hashes of blocks that other workers have stored and removed."""

    stored: Sequence[bytes]
    removed: Sequence[bytes]


class _Listing(NamedTuple):
    changed_ns: int
    is_settled: bool  # it was listed twice since the change: the clock may be coarse
    hashes: frozenset[bytes]


class OtherFolders:
    """Listing of the other workers' folders.

    Args:
        folder: Folder of this worker, beside those of the others.
        key: Name of the folders with exchangeable blocks.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._own = folder
        self._key = key
        self._listings: dict[Path, _Listing] = {}
        self.folder_of: dict[bytes, Path] = {}  # of each block at the last look
        self._problems: set[str] = set()

    def folders(self) -> list[Path]:
        """Return the folders of other workers that may have exchangeable blocks.

        Raises:
            OSError: The folder around them cannot be listed.
        """
        workers = [one for one in self._own.parent.iterdir() if one != self._own]
        return [worker / self._key for worker in workers]

    def look(self) -> OtherBlocks:
        """List folders that have changed; return what came and went since the last look."""
        listings: dict[Path, _Listing] = {}
        try:
            folders = self.folders()
        except OSError as error:
            self._warn(error)
            return OtherBlocks((), ())
        for folder in folders:
            try:
                listings[folder] = _listed(folder, self._listings.get(folder))
            except (FileNotFoundError, NotADirectoryError):
                continue  # a worker of another model, or no worker
            except OSError as error:  # the others can be read nevertheless
                self._warn(error)
        if listings == self._listings:
            return OtherBlocks((), ())
        before = self.folder_of
        after = {name: folder for folder, one in listings.items() for name in one.hashes}
        self._listings = listings
        self.folder_of = after
        return OtherBlocks([*(after.keys() - before.keys())], [*(before.keys() - after.keys())])

    def _warn(self, error: OSError) -> None:
        if f"{error}" not in self._problems:
            self._problems.add(f"{error}")
            _LOG.warning("cannot list the KV blocks of another worker: %s", error)


def _listed(folder: Path, before: _Listing | None) -> _Listing:
    changed_ns = folder.stat().st_mtime_ns
    is_unchanged = before is not None and before.changed_ns == changed_ns
    if before is not None and is_unchanged and before.is_settled:
        return before
    return _Listing(changed_ns, is_unchanged, frozenset(hashes_in(folder)))


class FolderWatch:
    """Thread that looks at the other workers' folders; a file system that hangs delays only it.

    Args:
        report: Receives the changes, in the thread.
    """

    def __init__(self, others: OtherFolders, report: Callable[[OtherBlocks], None]) -> None:
        self._others = others
        self._report = report
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv tier folders", daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """End the thread; return whether it has ended."""
        self._closing.set()
        self._thread.join(_LAST_LOOK_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._closing.wait(pause_s):
            began_s = time.monotonic()
            changes = self._others.look()
            if changes.stored or changes.removed:
                self._report(changes)
            pause_s = max(_LOOK_S, _PAUSES * (time.monotonic() - began_s))


def hashes_in(folder: Path) -> list[bytes]:
    """Return the hashes of the blocks in a folder; files of others are skipped."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if NAME.fullmatch(entry.name)]
    return [bytes.fromhex(name.removesuffix(SUFFIX)) for name in names]
