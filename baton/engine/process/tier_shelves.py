"""Storage of a tier's blocks: host memory, or a folder of files. For one thread at a time.

A block is stored in the pool's order, layer by layer, with an xxh3-64 over its bytes and its block
hash. A block that does not match is damaged and is computed again.

The disk tiers of a fleet may share a folder:

    FLEET/worker-0/KEY/HASH.kv    of this worker, which alone writes and evicts them
    FLEET/decode-1/KEY/HASH.kv    of another one; here they are only read

As each file has one owner, workers need no lock. A file that its owner has removed is a miss.
A folder is listed again when its time of modification changes, as on all POSIX file systems.
"""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from baton.engine.core.tiers.places import ELSEWHERE
from baton.types.block_hashes import tag_in

Bytes = npt.NDArray[np.uint8]

_HEADER = struct.Struct("<8s16sQQ")  # magic, block hash, payload bytes, digest
_MAGIC = b"batonkv1"
_UNFINISHED = ".new"
_KEY = re.compile(r"[0-9a-f]{32}")
_LOG = logging.getLogger(__name__)

SUFFIX = ".kv"
NAME = re.compile(r"[0-9a-f]{32}" + re.escape(SUFFIX))
"""Name of a complete file: its block hash."""

_LOOK_S = 1.0  # at least the granularity of times of modification
_PAUSES = 50  # least time between two looks, in durations of the last one
_LAST_LOOK_S = 2.0


class DamagedError(Exception):
    """Stored data differs from what was written."""


class BlockGoneError(Exception):
    """Another worker has removed its block."""


class ShelfError(Exception):
    """A tier cannot be used; the message gives the reason."""


def digest(block_hash: bytes, data: Bytes) -> int:
    """Return a digest that binds a block's bytes to its hash."""
    return xxhash.xxh3_64_intdigest(data.data, seed=int.from_bytes(block_hash[:8], "little"))


class MemoryShelf:
    """Blocks in memory of this process."""

    def __init__(self, places: int, block_bytes: int) -> None:
        self._blocks = np.empty((places, block_bytes), np.uint8)
        self._digests = [0] * places
        self._names = [b""] * places

    def write(self, place: int, block_hash: bytes, data: Bytes) -> None:
        """Write a block to a place."""
        self._blocks[place] = data
        self._names[place] = block_hash
        self._digests[place] = digest(block_hash, self._blocks[place])

    def read(self, place: int, block_hash: bytes) -> Bytes:
        """Return a view of the block at a place.

        Raises:
            DamagedError: The place has other data or none.
        """
        data: Bytes = self._blocks[place]
        if digest(block_hash, data) != self._digests[place]:
            raise DamagedError(f"block {place} of the memory tier")
        return data

    def erase(self, tags: frozenset[bytes]) -> int:
        """Overwrite the blocks with these tags; return their number."""
        places = [place for place, name in enumerate(self._names) if tag_in(name) in tags]
        for place in places:
            self._blocks[place] = 0
            self._names[place] = b""
        return len(places)

    def close(self) -> None:
        """Do nothing: the memory ends with the process."""


class DiskShelf:
    """Files of one block each, named by block hash.

    A damaged file costs only one block. A file with its final name is complete, because it is
    written under another name and renamed. Blocks of a former process are found by listing the
    folder.

    Args:
        folder: Folder used by this worker alone. Blocks of a former process are used if their
            ``key`` is the same, and deleted otherwise.
        key: Digest of model, numerics and layout.
        shared: Whether blocks in the folders of other workers, beside ``folder``, are read.

    Attributes:
        found: (hash, place) of existing blocks, the oldest first.
        others: The folders of other workers; None: they are not read.

    Raises:
        ShelfError: The folder cannot be written, or another process uses it.
    """

    def __init__(
        self, folder: Path, key: str, places: int, block_bytes: int, *, shared: bool = False
    ) -> None:
        self.others = OtherFolders(folder, key) if shared else None
        self._folder = folder / key
        self._block_bytes = block_bytes
        self._names = [b""] * places
        self._buffer = np.empty(_HEADER.size + block_bytes, np.uint8)
        self._lock = -1
        try:
            # Prompts can be reconstructed from KV: only this user may read it.
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.chmod(0o700)
            self._lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._clean(folder)
            self.found = self._find()
            (self._folder / "probe").write_bytes(b"")
            (self._folder / "probe").unlink()
        except BlockingIOError:
            self.close()
            raise ShelfError(f"{folder}: in use by another process") from None
        except OSError as error:
            self.close()
            raise ShelfError(f"{folder}: {error.strerror or error}") from error

    def erase(self, tags: frozenset[bytes]) -> int:
        """Delete the files of the blocks with these tags; return their number.

        Raises:
            OSError: Some cannot be deleted.
        """
        self._names = [b"" if tag_in(name) in tags else name for name in self._names]
        count = _erase(self._folder, tags)
        if self.others is not None:  # a worker that has ended cannot erase its own
            count += sum(_erase(folder, tags) for folder in self.others.folders())
        return count

    def close(self) -> None:
        """Unlock the tier's folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _clean(self, folder: Path) -> None:
        for other in folder.iterdir():
            if other.is_dir() and other != self._folder and _KEY.fullmatch(other.name):
                shutil.rmtree(other, ignore_errors=True)
        for path in self._folder.glob("*" + _UNFINISHED):
            path.unlink()

    def _find(self) -> list[tuple[bytes, int]]:
        size_bytes = _HEADER.size + self._block_bytes
        ages: list[tuple[int, str]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if not NAME.fullmatch(entry.name):
                    continue  # not a file of a tier
                stat = entry.stat()
                if stat.st_size == size_bytes:
                    ages.append((stat.st_mtime_ns, entry.name))
                else:
                    (self._folder / entry.name).unlink()
        ages.sort()
        places = len(self._names)
        for _, name in ages[: max(len(ages) - places, 0)]:
            (self._folder / name).unlink()
        files = []
        for place, (_, name) in enumerate(ages[max(len(ages) - places, 0) :]):
            self._names[place] = bytes.fromhex(name.removesuffix(SUFFIX))
            files.append((self._names[place], place))
        return files

    def _path(self, block_hash: bytes) -> Path:
        return self._folder / (block_hash.hex() + SUFFIX)

    def write(self, place: int, block_hash: bytes, data: Bytes) -> None:
        """Write a block to a place and delete the former block, or raise ``OSError``."""
        if former := self._names[place]:
            self._names[place] = b""
            self._path(former).unlink(missing_ok=True)
        path = self._path(block_hash)
        unfinished = path.with_suffix(_UNFINISHED)
        header = _HEADER.pack(_MAGIC, block_hash, len(data), digest(block_hash, data))
        try:
            with unfinished.open("wb", buffering=0) as file:
                _write_all(file.fileno(), header)
                _write_all(file.fileno(), data.data)
            unfinished.rename(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        self._names[place] = block_hash

    def read(self, place: int, block_hash: bytes) -> Bytes:
        """Return the block at a place; the data is valid until the next call.

        Raises:
            DamagedError: The file has other data or is missing.
            BlockGoneError: The block was ``ELSEWHERE`` and is not there any more.
            OSError: The block cannot be read.
        """
        path = self._path(block_hash)
        if place == ELSEWHERE:
            folder = self.others.folder_of.get(block_hash) if self.others is not None else None
            if folder is None:
                raise BlockGoneError(f"{path.name} of another worker")
            path = folder / path.name
        try:
            with path.open("rb", buffering=0) as file:
                count = file.readinto(self._buffer.data)
        except FileNotFoundError:
            if place == ELSEWHERE:
                raise BlockGoneError(f"{path}") from None
            raise DamagedError(f"{path} is missing") from None
        data = self._buffer[_HEADER.size :]
        wanted = _HEADER.pack(_MAGIC, block_hash, self._block_bytes, digest(block_hash, data))
        if count != len(self._buffer) or self._buffer[: _HEADER.size].tobytes() != wanted:
            raise DamagedError(f"{path} is damaged")
        return data


Shelf = MemoryShelf | DiskShelf
"""Storage of blocks by place."""


def _erase(folder: Path, tags: frozenset[bytes]) -> int:
    """Delete the files of the blocks with these tags; return how many there were."""
    hashes: list[bytes] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # of no worker, by now
        hashes = [one for one in hashes_in(folder) if tag_in(one) in tags]
    count = 0
    for block_hash in hashes:
        with contextlib.suppress(FileNotFoundError):
            (folder / (block_hash.hex() + SUFFIX)).unlink()
            count += 1
    return count


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


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
