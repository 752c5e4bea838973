"""LoRA adapters that clients may use: those of the fleet file, and those loaded at run time.

Routers share the latter through Redis. Each change has a time and the newest wins, even if Redis
was emptied or restored from an old state. Unloaded names are remembered for a day. Any router can
load an adapter, and the others follow within a second. A file keeps the table during a restart
while Redis is unavailable.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from baton.model.artifact import ModelConfig
from baton.model.lora_artifact import AdapterError, read_adapter
from baton.registry.json_file import keep
from baton.registry.redis_store import RegistryUnavailableError
from baton.registry.shared_adapters import SharedAdapters
from baton.telemetry.tasks import BackgroundTasks
from baton.types.errors import (
    AdapterExistsError,
    ForbiddenError,
    InvalidRequestError,
    ModelNotFoundError,
)
from baton.types.params import AdapterRef

_LOG = logging.getLogger(__name__)

POLL_S = 0.5
MAX_NAMES = 1024
MAX_NAMES_OF_A_TENANT = 64
MAX_NAME_LENGTH = 200
MAX_REMEMBERED = 16 * MAX_NAMES
MAX_REMEMBERED_OF_A_TENANT = 16 * MAX_NAMES_OF_A_TENANT
"""Limit of names, including those unloaded in the last day: every router reads all of them."""

_REMEMBER_GONE_MS = 24 * 3600 * 1000


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of the table.

    Attributes:
        owner: Tenant that loaded the adapter for itself; empty: all tenants may use it.
        gone: Whether it was unloaded at ``changed_ms``.
    """

    name: str
    owner: str = ""
    digest: str = ""  # hexadecimal
    path: str = ""
    rank: int = 0
    targets: tuple[str, ...] = ()
    changed_ms: int = 0
    gone: bool = False

    def ref(self) -> AdapterRef:
        """Return the reference that is sent to workers."""
        return AdapterRef(self.name, self.digest, self.path)


class AdapterTable:
    """Adapters that one router serves, by name.

    Args:
        config: Configuration of the base model, which adapters must match.
        reserved: Names of the base model.
        load: Adapters of the fleet file, name to directory.
        max_loaded: Number of adapters that one worker holds; 0: adapters are not served.
        max_rank: Largest rank of an adapter.
        folder: Folder of adapters that may be loaded at run time; None: none may be.

    Raises:
        ValueError: An adapter of ``load`` cannot be used.
    """

    def __init__(
        self,
        config: ModelConfig,
        reserved: Iterable[str] = (),
        load: Mapping[str, str] | None = None,
        max_loaded: int = 8,
        max_rank: int = 64,
        folder: str | None = None,
    ) -> None:
        self._config = config
        self._reserved = frozenset(reserved)
        self._max_loaded = max_loaded
        self._max_rank = max_rank
        self._folder = None if folder is None else Path(folder)
        self._fixed = {name: self._read(name, path, 0) for name, path in (load or {}).items()}
        self._shared: dict[str, AdapterEntry] = {}
        self._shared_table: SharedAdapters | None = None
        self._file: Path | None = None
        self._tasks = BackgroundTasks("adapters", lambda name: self.count_failure(name))
        self.count_failure: Callable[[str], None] = lambda _: None

    def find(self, name: str, tenant: str | None = None) -> AdapterEntry | None:
        """Return the adapter of this name that the tenant may use (None: any tenant)."""
        entry = self._fixed.get(name) or self._shared.get(name)
        if entry is None or entry.gone or name in self._reserved:
            return None
        return entry if tenant is None or entry.owner in ("", tenant) else None

    def served(self, tenant: str | None = None) -> list[AdapterEntry]:
        """Return all adapters that the tenant may use (None: any tenant)."""
        names = sorted(self._fixed.keys() | self._shared.keys())
        return [entry for name in names if (entry := self.find(name, tenant)) is not None]

    async def load(self, name: str, path: str, owner: str = "") -> AdapterEntry:
        """Serve an adapter under a name.

        Args:
            name: Model name; with an owner, it must begin with ``OWNER/`` to avoid conflicts.
            path: Directory below the adapter folder; with an owner, below its subfolder ``OWNER``.
            owner: Tenant that loads the adapter for itself; empty: all tenants may use it.

        Raises:
            InvalidRequestError: The adapter, its path or the name cannot be used.
            AdapterExistsError: The name is in use.
        """
        if owner and not name.startswith(f"{owner}/"):
            raise InvalidRequestError.at(
                "lora_name", f"must begin with {owner + '/'!r} with this API key"
            )
        self._check_free(name)
        self._check_count(name, owner)
        try:
            entry = await asyncio.to_thread(self._read_below, name, path, owner)
        except AdapterError as error:
            raise InvalidRequestError.at("lora_path", f"{error}") from error
        self._check_free(name)  # a concurrent call may have used it
        await self._change(entry)
        return entry

    async def unload(self, name: str, owner: str = "") -> None:
        """Stop serving a name. Running requests finish; workers unload it when they need space.

        Args:
            name: Model name of the adapter.
            owner: Tenant that unloads its own adapter; empty: an operator, for any adapter.

        Raises:
            ModelNotFoundError: The owner has no access to an adapter of this name.
            ForbiddenError: The adapter is shared by all tenants.
            InvalidRequestError: The adapter is in the fleet file.
        """
        entry = self.find(name, owner or None)
        if entry is not None and owner and not entry.owner:
            raise ForbiddenError(
                f"lora_name: {name!r} is shared by all tenants; only an operator may unload it"
            )
        if name in self._fixed:
            raise InvalidRequestError.at(
                "lora_name", f"{name!r} is in the fleet file; remove it from adapters.load"
            )
        if entry is None:
            raise ModelNotFoundError.at("lora_name", f"adapter {name[:200]!r} is not loaded")
        gone = AdapterEntry(name=name, owner=entry.owner, changed_ms=self._next_ms(name), gone=True)
        await self._change(gone)

    def start(self, shared: SharedAdapters | None, file: Path | None = None) -> None:
        """Start sharing, and keep the table in ``file``. Requires a running event loop."""
        self._shared_table = shared
        self._file = file
        if file is not None and file.exists():
            self._adopt(_decode_file(file))
        if shared is not None:
            self._tasks.keep(lambda: self._follow(shared), "adapters")

    async def close(self) -> None:
        """Stop sharing the table."""
        await self._tasks.close()

    async def exchange(self, shared: SharedAdapters) -> None:
        """Copy newer entries from the shared table, and add newer ones of this table to it.

        Raises:
            RegistryUnavailableError: Redis does not answer.
        """
        decoded = [_decode(raw) for raw in (await shared.adapters()).values()]
        theirs = {entry.name: entry for entry in decoded if entry is not None}
        self._adopt(theirs.values())
        if old := [entry.name for entry in theirs.values() if _is_forgotten(entry)]:
            await shared.drop_adapters(old)
        newer = {
            entry.name: msgspec.json.encode(entry)
            for entry in self._shared.values()
            if entry.name not in theirs or theirs[entry.name].changed_ms < entry.changed_ms
        }
        if newer:
            await shared.put_adapters(newer)

    async def _follow(self, shared: SharedAdapters) -> None:
        while True:
            try:
                await self.exchange(shared)
            except RegistryUnavailableError:
                _LOG.debug("registry is unavailable; using the known adapters")
            await asyncio.sleep(POLL_S)

    async def _change(self, entry: AdapterEntry) -> None:
        self._adopt([entry])
        if self._shared_table is not None:
            try:
                await self.exchange(self._shared_table)
            except RegistryUnavailableError as error:
                _LOG.warning("sharing adapter=%s later: %s", entry.name, error)

    def _adopt(self, entries: Iterable[AdapterEntry]) -> None:
        changed = False
        for entry in entries:
            known = self._shared.get(entry.name)
            if _is_forgotten(entry):
                continue
            if known is None or known.changed_ms < entry.changed_ms:
                self._shared[entry.name] = entry
                changed = True
        for entry in list(self._shared.values()):
            if _is_forgotten(entry):
                del self._shared[entry.name]
        if changed:
            keep(self._file, list(self._shared.values()))

    def _read_below(self, name: str, path: str, owner: str) -> AdapterEntry:
        """Read an adapter that must be below the adapter folder after resolving links."""
        if self._folder is None:
            raise AdapterError(
                "adapters cannot be loaded at run time; set `adapters: {folder: FOLDER}` in the "
                "fleet file"
            )
        folder = (self._folder / owner).resolve()
        try:
            found = (folder / path).resolve()
        except (OSError, ValueError, RuntimeError) as error:  # a null byte, or a loop of links
            raise AdapterError(f"{path[:200]!r}: cannot be read ({error})") from error
        if not found.is_relative_to(folder):
            raise AdapterError(f"{path[:200]!r} is not below {folder}")
        entry = self._read(name, str(found), self._next_ms(name))
        return msgspec.structs.replace(entry, owner=owner)

    def _check_count(self, name: str, owner: str) -> None:
        served = self.served()
        if len(served) >= MAX_NAMES:
            raise InvalidRequestError(
                f"lora_name: {MAX_NAMES} adapters are loaded, the limit; unload one"
            )
        own = sum(1 for entry in served if entry.owner == owner) if owner else 0
        if own >= MAX_NAMES_OF_A_TENANT:
            raise InvalidRequestError(
                f"lora_name: {own} adapters of {owner} are loaded, the limit; unload one"
            )
        known = [entry for entry in self._shared.values() if owner in ("", entry.owner)]
        most = MAX_REMEMBERED_OF_A_TENANT if owner else MAX_REMEMBERED
        if len(known) >= most and name not in self._shared:
            raise InvalidRequestError.at(
                "lora_name",
                f"{len(known)} names were loaded or unloaded within a day, the limit; "
                "use one of these names again, or wait",
            )

    def _read(self, name: str, path: str, changed_ms: int) -> AdapterEntry:
        if not self._max_loaded:
            raise AdapterError("this fleet serves no adapters (adapters.max_loaded is 0)")
        artifact = read_adapter(path, self._config, self._max_rank)
        return AdapterEntry(
            name=name,
            digest=artifact.digest.hex(),
            path=str(artifact.path.resolve()),
            rank=artifact.rank,
            targets=artifact.targets,
            changed_ms=changed_ms,
        )

    def _check_free(self, name: str) -> None:
        if len(name) > MAX_NAME_LENGTH or not name.isprintable():
            raise InvalidRequestError.at(
                "lora_name", f"must be 1 to {MAX_NAME_LENGTH} printable characters"
            )
        if name in self._reserved:
            raise AdapterExistsError.at("lora_name", f"{name!r} is a name of the base model")
        if self.find(name) is not None:
            raise AdapterExistsError.at(
                "lora_name", f"adapter {name!r} is already loaded; unload it first"
            )

    def _next_ms(self, name: str) -> int:
        known = self._shared.get(name)
        return max(_now_ms(), known.changed_ms + 1 if known else 0)


def _is_forgotten(entry: AdapterEntry) -> bool:
    """Return whether the name was unloaded so long ago that routers need not remember it."""
    return entry.gone and entry.changed_ms < _now_ms() - _REMEMBER_GONE_MS


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _decode(raw: bytes) -> AdapterEntry | None:
    try:
        return msgspec.json.decode(raw, type=AdapterEntry)
    except msgspec.DecodeError:
        return None  # written by another version


def _decode_file(file: Path) -> list[AdapterEntry]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[AdapterEntry])
    except (OSError, msgspec.DecodeError) as error:
        _LOG.warning("cannot read adapters from %s: %s", file, error)
        return []
