"""Files and batches on the disk. All functions block: call them in a thread.

    <root>/<tenant>/files/file-….json       metadata of a file
    <root>/<tenant>/files/file-….data       content of a file
    <root>/<tenant>/batches/batch_….json    record of a batch
    <root>/<tenant>/batches/batch_….cancel  the tenant has cancelled the batch
    <root>/<tenant>/batches/batch_….output  responses so far; `….errors`: failed lines

Records are replaced atomically. Several routers of one machine may share the folder: all of them
handle calls, and the one that has the lock runs batches.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from baton.config.clients import BatchConfig
from baton.folders import make_private, replace_file
from baton.types.errors import InvalidRequestError, PayloadTooLargeError
from router.frontend.batch.record import BatchRecord

MAX_FILES = 1000
"""Limit of one tenant's files, and of its batches."""

LOCK = "lock"
"""Name of the lock file next to the tenants' folders."""

OWN_FILE = 0o600
"""Mode of files, which only this user may read."""

_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{32}")
_DAY_S = 24 * 3600
_STRAY_S = 24 * 3600  # age at which a file without a record, left by a dead process, is removed


class FileRecord(msgspec.Struct, kw_only=True):
    """Metadata of a file."""

    id: str
    size_bytes: int
    filename: str
    purpose: str
    created_s: int
    expires_s: int

    def shown(self) -> dict[str, Any]:
        """Return the metadata in OpenAI's format."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


_Record = TypeVar("_Record", FileRecord, BatchRecord)


class BatchStore:
    """Files and batches of all tenants in the folder ``root``, which is created when needed.

    ``keep_s_of`` returns the time that those of a tenant are kept, if shorter; None: the limit.
    """

    def __init__(
        self,
        root: Path,
        limits: BatchConfig,
        keep_s_of: Callable[[str], int | None] = lambda _: None,
    ) -> None:
        self.root = root
        self.limits = limits
        self._keep_s_of = keep_s_of
        self._looked: dict[str, tuple[int, bool]] = {}  # see `open_batches`

    def keep_s(self, tenant: str) -> int:
        """Return the time that files and ended batches of a tenant are kept; 0: none is stored."""
        own = self._keep_s_of(tenant)
        most = self.limits.keep_days * _DAY_S
        return most if own is None else min(own, most)

    def room_bytes(self, tenant: str) -> int:
        """Return the number of bytes that a tenant may add."""
        own = self.limits.max_bytes_per_tenant - _bytes_below(self.root / tenant)
        return max(min(own, self.limits.max_bytes - _bytes_below(self.root)), 0)

    def check_room(self, tenant: str, more_bytes: int) -> None:
        """Raise PayloadTooLargeError if ``more_bytes`` would exceed a limit."""
        own = _bytes_below(self.root / tenant)
        if own + more_bytes > self.limits.max_bytes_per_tenant:
            raise PayloadTooLargeError(
                f"this tenant's files have {own} bytes, and {more_bytes} more would exceed the "
                f"limit of {self.limits.max_bytes_per_tenant}; delete some"
            )
        if _bytes_below(self.root) + more_bytes > self.limits.max_bytes:
            raise PayloadTooLargeError(
                f"the files of all tenants would exceed the limit of {self.limits.max_bytes} bytes"
            )
        if len(list(self._folder(tenant, "files").glob("*.json"))) >= MAX_FILES:
            raise PayloadTooLargeError(f"this tenant has {MAX_FILES} files, the limit; delete some")

    def add_file(
        self, tenant: str, source: IO[bytes], filename: str, purpose: str, now_s: float, keep_s: int
    ) -> FileRecord:
        """Store the content of ``source`` as a new file, within the limits of `check_room`."""
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        self.check_room(tenant, size)
        data = self.data_path(tenant, f"file-{secrets.token_hex(16)}")
        try:
            with open(data, "wb", opener=_private) as target:
                shutil.copyfileobj(source, target, 1024 * 1024)
            keep_s = min(keep_s, self.keep_s(tenant))
            return _describe(data, size, filename, purpose, now_s, keep_s)
        except BaseException:
            data.unlink(missing_ok=True)  # without a record it could not be deleted
            raise

    def new_id(self, path: Path) -> str | None:
        """Return an id for the file that `adopt` makes of a batch's output; None if it is empty."""
        has_output = path.exists() and path.stat().st_size > 0
        return f"file-{secrets.token_hex(16)}" if has_output else None

    def adopt(self, tenant: str, path: Path, file_id: str, filename: str, now_s: float) -> None:
        """Convert a batch's output to a file. Repeated calls have no effect."""
        data = self.data_path(tenant, file_id)
        source = path if path.exists() else data
        if not source.exists():  # already converted, and deleted afterwards
            return
        size = source.stat().st_size
        _describe(data, size, filename, "batch_output", now_s, self.keep_s(tenant))
        if path.exists():
            path.rename(data)

    def file(self, tenant: str, file_id: str) -> FileRecord | None:
        """Return the metadata of a tenant's file, or None."""
        return self._read(tenant, "files", file_id, FileRecord)

    def files(self, tenant: str) -> list[FileRecord]:
        """Return a tenant's files, newest first."""
        return self._all(tenant, "files", FileRecord)

    def data_path(self, tenant: str, file_id: str) -> Path:
        """Return the path of a file's content. The id must be valid."""
        return self._folder(tenant, "files") / f"{file_id}.data"

    def delete_file(self, tenant: str, file_id: str) -> bool:
        """Delete a file; return False if it does not exist.

        Raises:
            InvalidRequestError: The file is the input of a batch that has not ended.
        """
        if self.file(tenant, file_id) is None:
            return False
        for batch in self.batches(tenant):
            if batch.input_file_id == file_id and not batch.ended:
                raise InvalidRequestError.at(
                    "file_id", f"the file is in use by {batch.id}; cancel it first"
                )
        return self.remove(tenant, "files", file_id)

    def save(self, batch: BatchRecord) -> None:
        """Write a batch's record at once."""
        replace_file(self.path_of(batch, "json"), msgspec.json.encode(batch))

    def save_known(self, batch: BatchRecord) -> bool:
        """Do the same; return False, and write nothing, if the record was deleted."""
        with self.changing(batch.tenant):
            if not self.has(batch):
                return False
            self.save(batch)
            return True

    def has(self, batch: BatchRecord) -> bool:
        """Return whether the batch has a record."""
        return self.path_of(batch, "json").exists()

    def remove(self, tenant: str, kind: str, record_id: str) -> bool:
        """Remove a record of ``files`` or ``batches`` and all beside it, the record last.

        Return whether this call removed the record.
        """
        folder = self._folder(tenant, kind)
        for path in folder.glob(f"{record_id}.*"):
            if path.suffix != ".json":
                path.unlink(missing_ok=True)
        try:
            (folder / f"{record_id}.json").unlink()
        except FileNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def changing(self, tenant: str) -> Iterator[None]:
        """Exclude other ends and deletions of a tenant's batches by processes of this host."""
        held = os.open(self._folder(tenant, "batches"), os.O_RDONLY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield
        finally:
            os.close(held)

    def batch(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """Return a tenant's batch, or None."""
        return self._read(tenant, "batches", batch_id, BatchRecord)

    def batches(self, tenant: str) -> list[BatchRecord]:
        """Return a tenant's batches, newest first."""
        return self._all(tenant, "batches", BatchRecord)

    def open_batches(self) -> list[BatchRecord]:
        """Return all tenants' batches that have not ended, oldest first.

        This is called twice a second. A folder without open batches is read again only if its
        modification time changes. Two changes may have the same time, so a folder is skipped only
        after two calls found the same time.
        """
        looked: dict[str, tuple[int, bool]] = {}
        all_open: list[BatchRecord] = []
        for path in self.root.glob("*/batches"):
            tenant = path.parent.name
            changed_ns = path.stat().st_mtime_ns
            before_ns, is_quiet = self._looked.get(tenant, (0, False))
            if not (is_quiet and changed_ns == before_ns):
                open_ones = [batch for batch in self.batches(tenant) if not batch.ended]
                all_open += open_ones
                is_quiet = not open_ones and changed_ns == before_ns
            looked[tenant] = changed_ns, is_quiet
        self._looked = looked
        return sorted(all_open, key=lambda record: (record.created_s, record.id))

    def ask_to_cancel(self, batch: BatchRecord) -> None:
        """Request cancellation from the router that runs the batch."""
        self.path_of(batch, "cancel").touch(mode=OWN_FILE)

    def is_cancelled(self, batch: BatchRecord) -> bool:
        """Return whether cancellation was requested."""
        return self.path_of(batch, "cancel").exists()

    def path_of(self, batch: BatchRecord, kind: str) -> Path:
        """Return the path of a batch's ``json``, ``output``, ``errors`` or ``cancel``."""
        return self._folder(batch.tenant, "batches") / f"{batch.id}.{kind}"

    def sweep(self, now_s: float) -> None:
        """Remove expired files and batches."""
        for tenant in [path.name for path in self.root.glob("*") if path.is_dir()]:
            keep_s = self.keep_s(tenant)
            for batch in self.batches(tenant):
                if batch.ended and batch.ended_s + keep_s < now_s:
                    self.remove(tenant, "batches", batch.id)
            for record in self.files(tenant):
                if min(record.expires_s, record.created_s + keep_s) < now_s:
                    with contextlib.suppress(InvalidRequestError):  # its batch has not ended
                        self.delete_file(tenant, record.id)
            self.sweep_strays(tenant, now_s - _STRAY_S)

    def sweep_strays(self, tenant: str, until_s: float) -> None:
        """Remove files without a record, which count towards the limits but cannot be deleted."""
        for path in (self.root / tenant).glob("*/*"):
            if path.suffix == ".json" or path.with_suffix(".json").exists():
                continue
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime <= until_s:
                    path.unlink()

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Try to get the lock for running batches. The kernel releases it when the process dies."""
        make_private(self.root)
        with open(self.root / LOCK, "a", opener=_private) as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def _folder(self, tenant: str, kind: str) -> Path:
        folder = self.root / tenant / kind
        for level in (self.root, folder.parent, folder):
            make_private(level)
        return folder

    def _read(
        self, tenant: str, kind: str, record_id: str, record: type[_Record]
    ) -> _Record | None:
        # The id is from a client and becomes part of a path.
        if _ID.fullmatch(record_id) is None:
            return None
        return _decoded(self.root / tenant / kind / f"{record_id}.json", record)

    def _all(self, tenant: str, kind: str, record: type[_Record]) -> list[_Record]:
        paths = (self.root / tenant / kind).glob("*.json")
        records = [decoded for path in paths if (decoded := _decoded(path, record)) is not None]
        return sorted(records, key=lambda record: (-record.created_s, record.id))


def _private(path: str, flags: int) -> int:
    """Open a file that only this user may read; the ``opener`` of ``open``."""
    return os.open(path, flags, OWN_FILE)


def _describe(
    data: Path, size_bytes: int, filename: str, purpose: str, now_s: float, keep_s: int
) -> FileRecord:
    """Write the metadata of a file beside its content."""
    created_s = int(now_s)
    named = {"id": data.stem, "filename": filename, "purpose": purpose}
    record = FileRecord(
        **named, size_bytes=size_bytes, created_s=created_s, expires_s=created_s + keep_s
    )
    replace_file(data.with_suffix(".json"), msgspec.json.encode(record))
    return record


def _decoded(path: Path, record: type[_Record]) -> _Record | None:
    """Read a record; None if it is missing or corrupt."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=record)
    except (OSError, msgspec.DecodeError):
        return None


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(parent) / name).stat().st_size
    return total
