"""Files and batches on the disk. Everything here blocks: call it in a thread.

    <root>/<tenant>/files/file-….json       what is known of a file
    <root>/<tenant>/files/file-….data       its bytes
    <root>/<tenant>/batches/batch_….json    the record
    <root>/<tenant>/batches/batch_….cancel  the tenant wants no more of it
    <root>/<tenant>/batches/batch_….output  answers so far, `….errors` the lines that failed

Records are replaced as a whole, so that a reader never sees half of one. Several routers of one
machine may share the folder: all take calls, and one of them, which has the lock, runs batches.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from baton.config.batch import BatchConfig
from baton.types.errors import InvalidRequestError, PayloadTooLargeError
from router.frontend.batch.record import BatchRecord

MAX_FILES = 1000
"""Of one tenant; batches as well."""

LOCK = "lock"
"""A file beside the folders of the tenants."""

_STRAY_S = 24 * 3600
"""A file without a record, left by a process that died, is removed when it is so old."""

_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{32}")
_DAY_S = 24 * 3600

_Record = TypeVar("_Record", bound=msgspec.Struct)


class FileRecord(msgspec.Struct, kw_only=True):
    """What is known of a file."""

    id: str
    size_bytes: int
    filename: str
    purpose: str
    created_s: int
    expires_s: int

    def shown(self) -> dict[str, Any]:
        """As OpenAI shows a file."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class BatchStore:
    """All files and batches of a fleet's tenants.

    Args:
        root: The folder, made when it is needed.
        limits: How much may lie in it, and for how long.
    """

    def __init__(self, root: Path, limits: BatchConfig) -> None:
        self.root = root
        self.limits = limits
        self._looked: dict[str, tuple[int, bool]] = {}  # see `open_batches`

    # --- files -----------------------------------------------------------------------------------

    def room_bytes(self, tenant: str) -> int:
        """How many bytes more may lie here of a tenant."""
        own = self.limits.max_bytes_per_tenant - _bytes_below(self.root / tenant)
        return max(min(own, self.limits.max_bytes - _bytes_below(self.root)), 0)

    def check_room(self, tenant: str, more_bytes: int) -> None:
        """Refuse what would not fit.

        Raises:
            PayloadTooLargeError: Bytes or files would be too many; says which limit it is.
        """
        own = _bytes_below(self.root / tenant)
        if own + more_bytes > self.limits.max_bytes_per_tenant:
            raise PayloadTooLargeError(
                f"this tenant's files hold {own} bytes, and {more_bytes} more would be over the "
                f"limit of {self.limits.max_bytes_per_tenant}; delete some"
            )
        if _bytes_below(self.root) + more_bytes > self.limits.max_bytes:
            raise PayloadTooLargeError(
                f"all tenants' files together are at the limit of {self.limits.max_bytes} bytes"
            )
        if len(list(self._folder(tenant, "files").glob("*.json"))) >= MAX_FILES:
            raise PayloadTooLargeError(f"this tenant has {MAX_FILES} files, the limit; delete some")

    def add_file(
        self, tenant: str, source: IO[bytes], filename: str, purpose: str, now_s: float, keep_s: int
    ) -> FileRecord:
        """Keep the bytes of ``source`` as a new file.

        Raises:
            PayloadTooLargeError: There is no room.
        """
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        self.check_room(tenant, size)
        record = FileRecord(
            id=f"file-{secrets.token_hex(16)}",
            size_bytes=size,
            filename=filename,
            purpose=purpose,
            created_s=int(now_s),
            expires_s=int(now_s) + min(keep_s, self.limits.keep_days * _DAY_S),
        )
        data = self._data(tenant, record.id)
        try:
            with data.open("wb") as target:
                shutil.copyfileobj(source, target, 1024 * 1024)
            self._write(self._folder(tenant, "files") / f"{record.id}.json", record)
        except BaseException:
            data.unlink(missing_ok=True)  # nobody could find it, and it would count for ever
            raise
        return record

    def new_id(self, path: Path) -> str | None:
        """The id of the file that `adopt` is to make of a batch's answers; None for no answers."""
        found = path.exists() and path.stat().st_size > 0
        return f"file-{secrets.token_hex(16)}" if found else None

    def adopt(self, tenant: str, path: Path, file_id: str, filename: str, now_s: float) -> None:
        """Make a file of a batch's answers. To do so again changes nothing."""
        data = self._data(tenant, file_id)
        source = path if path.exists() else data
        if not source.exists():  # done before, and deleted since
            return
        size = source.stat().st_size
        record = FileRecord(
            id=file_id,
            size_bytes=size,
            filename=filename,
            purpose="batch_output",
            created_s=int(now_s),
            expires_s=int(now_s) + self.limits.keep_days * _DAY_S,
        )
        self._write(self._folder(tenant, "files") / f"{file_id}.json", record)
        if path.exists():
            path.rename(data)

    def file(self, tenant: str, file_id: str) -> FileRecord | None:
        """What is known of a file of this tenant's."""
        return self._read(tenant, "files", file_id, FileRecord)

    def files(self, tenant: str) -> list[FileRecord]:
        """A tenant's files, the newest first."""
        found = self._all(tenant, "files", FileRecord)
        return sorted(found, key=lambda record: (-record.created_s, record.id))

    def data_path(self, tenant: str, file_id: str) -> Path:
        """Where a file's bytes are; only for ids that `file` knows."""
        return self._data(tenant, file_id)

    def delete_file(self, tenant: str, file_id: str) -> bool:
        """Remove a file; False if there was none.

        Raises:
            InvalidRequestError: A batch that has not ended reads it.
        """
        if self.file(tenant, file_id) is None:
            return False
        for batch in self.batches(tenant):
            if batch.input_file_id == file_id and not batch.ended:
                raise InvalidRequestError(
                    f"file_id: {batch.id} still reads this file; cancel it first", param="file_id"
                )
        (self._folder(tenant, "files") / f"{file_id}.json").unlink(missing_ok=True)
        self._data(tenant, file_id).unlink(missing_ok=True)
        return True

    # --- batches ---------------------------------------------------------------------------------

    def save(self, batch: BatchRecord) -> None:
        """Write a batch's record, as a whole."""
        self._write(self._folder(batch.tenant, "batches") / f"{batch.id}.json", batch)

    def batch(self, tenant: str, batch_id: str) -> BatchRecord | None:
        """A batch of this tenant's."""
        return self._read(tenant, "batches", batch_id, BatchRecord)

    def batches(self, tenant: str) -> list[BatchRecord]:
        """A tenant's batches, the newest first."""
        found = self._all(tenant, "batches", BatchRecord)
        return sorted(found, key=lambda record: (-record.created_s, record.id))

    def open_batches(self) -> list[BatchRecord]:
        """All tenants' batches that have not ended, the oldest first.

        It is asked twice a second. A folder that had no open batch is read again when it changes.
        One change may hide behind another of the same instant, so two looks must agree.
        """
        looked: dict[str, tuple[int, bool]] = {}
        found: list[BatchRecord] = []
        for path in self.root.glob("*/batches"):
            tenant = path.parent.name
            changed_ns = path.stat().st_mtime_ns
            before_ns, is_quiet = self._looked.get(tenant, (0, False))
            if not (is_quiet and changed_ns == before_ns):
                open_ones = [batch for batch in self.batches(tenant) if not batch.ended]
                found += open_ones
                is_quiet = not open_ones and changed_ns == before_ns
            looked[tenant] = changed_ns, is_quiet
        self._looked = looked
        return sorted(found, key=lambda record: (record.created_s, record.id))

    def ask_to_cancel(self, batch: BatchRecord) -> None:
        """Tell whichever router runs it."""
        self.path_of(batch, "cancel").touch()

    def is_cancelled(self, batch: BatchRecord) -> bool:
        """Whether somebody has."""
        return self.path_of(batch, "cancel").exists()

    def path_of(self, batch: BatchRecord, kind: str) -> Path:
        """A batch's ``output``, ``errors`` or ``cancel``."""
        return self._folder(batch.tenant, "batches") / f"{batch.id}.{kind}"

    # --- the whole -------------------------------------------------------------------------------

    def sweep(self, now_s: float) -> None:
        """Remove what has lain here for long enough."""
        for tenant in [path.name for path in self.root.glob("*") if path.is_dir()]:
            for batch in self.batches(tenant):
                if batch.ended and batch.ended_s + self.limits.keep_days * _DAY_S < now_s:
                    for path in self._folder(tenant, "batches").glob(f"{batch.id}.*"):
                        path.unlink(missing_ok=True)
            for record in self.files(tenant):
                if record.expires_s < now_s:
                    with contextlib.suppress(InvalidRequestError):  # when its batch has ended
                        self.delete_file(tenant, record.id)
            self._sweep_strays(tenant, now_s)

    def _sweep_strays(self, tenant: str, now_s: float) -> None:
        """Remove what has no record: nobody can name it, and it counts towards the limits."""
        for path in (self.root / tenant).glob("*/*"):
            if path.suffix == ".json" or path.with_suffix(".json").exists():
                continue
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime + _STRAY_S < now_s:
                    path.unlink()

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Whether this is the process that runs batches; the kernel frees what a dead one held."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / LOCK).open("a") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def _folder(self, tenant: str, kind: str) -> Path:
        folder = self.root / tenant / kind
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder

    def _data(self, tenant: str, file_id: str) -> Path:
        return self._folder(tenant, "files") / f"{file_id}.data"

    def _read(
        self, tenant: str, kind: str, record_id: str, record: type[_Record]
    ) -> _Record | None:
        # The id comes from a client and becomes a part of a path.
        if _ID.fullmatch(record_id) is None:
            return None
        return _decoded(self.root / tenant / kind / f"{record_id}.json", record)

    def _all(self, tenant: str, kind: str, record: type[_Record]) -> list[_Record]:
        paths = (self.root / tenant / kind).glob("*.json")
        return [found for path in paths if (found := _decoded(path, record)) is not None]

    def _write(self, path: Path, record: msgspec.Struct) -> None:
        beside = path.with_suffix(f".{secrets.token_hex(4)}.part")
        try:
            beside.write_bytes(msgspec.json.encode(record))
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def _decoded(path: Path, record: type[_Record]) -> _Record | None:
    """A record; None where there is none, or where it is damaged: nobody can use it then."""
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
