"""The LoRA adapters that clients may name: those of the fleet file, and those loaded at run time.

Routers share the latter through Redis. Each change carries its time and the newest wins, also over
an emptied Redis or one that came back old; a name that was taken away is kept as such for a day. So
any router can be asked, the others follow within a second, and a file keeps the table over a
restart while Redis is away.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from baton.model.artifact import ModelConfig
from baton.model.lora_artifact import AdapterError, read_adapter
from baton.registry.json_file import keep
from baton.registry.redis_store import RegistryUnavailableError
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
"""Names, those included that were taken away in the last day: every router reads all of them."""

_REMEMBER_GONE_MS = 24 * 3600 * 1000


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One name.

    Attributes:
        owner: The tenant that loaded it, for itself alone; empty: it is everybody's.
        gone: It was unloaded at ``changed_ms``.
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
        """What workers are told."""
        return AdapterRef(self.name, self.digest, self.path)


class AdapterSharedTable(Protocol):
    """Where routers share their table; ``baton.registry.shared_adapters`` has it."""

    async def adapters(self) -> Mapping[str, bytes]:
        """All entries by name, encoded."""

    async def put_adapters(self, entries: Mapping[str, bytes]) -> None:
        """Write entries, over those of the same name."""

    async def drop_adapters(self, names: Collection[str]) -> None:
        """Remove entries."""


class AdapterTable:
    """The adapters that one router serves, by name.

    Args:
        config: Of the base model: what adapters must fit.
        reserved: Names of the model itself.
        load: Adapters of the fleet file, name to directory. Reads them.
        max_loaded: What one worker holds; 0 refuses every adapter.
        max_rank: The largest rank that is served.
        folder: What is loaded at run time lies below it; None: nothing is.

    Raises:
        ValueError: One of ``load`` cannot be used.
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
        self._shared_table: AdapterSharedTable | None = None
        self._file: Path | None = None
        self._tasks = BackgroundTasks("adapters", lambda name: self.count_failure(name))
        self.count_failure: Callable[[str], None] = lambda _: None

    def find(self, name: str, tenant: str | None = None) -> AdapterEntry | None:
        """The adapter of that name; a name of the model itself is never one.

        Args:
            name: The model name that a client gave.
            tenant: Adapters that other tenants own are not found; None: all are.
        """
        entry = self._fixed.get(name) or self._shared.get(name)
        if entry is None or entry.gone or name in self._reserved:
            return None
        return entry if tenant is None or entry.owner in ("", tenant) else None

    def served(self, tenant: str | None = None) -> list[AdapterEntry]:
        """Every adapter that the tenant may name; None: every adapter."""
        names = sorted(self._fixed.keys() | self._shared.keys())
        return [entry for name in names if (entry := self.find(name, tenant)) is not None]

    async def load(self, name: str, path: str, owner: str = "") -> AdapterEntry:
        """Serve an adapter under a name, from now on.

        Args:
            name: The model name. That of an owner begins with ``OWNER/``, so that tenants do not
                take names from each other.
            path: Its directory, below the adapter folder; that of an owner below ``OWNER`` there.
            owner: The tenant that loads it for itself; empty: everybody may use it.

        Raises:
            InvalidRequestError: The adapter, its path or the name cannot be used; says why.
            AdapterExistsError: The name is taken.
        """
        if owner and not name.startswith(f"{owner}/"):
            raise InvalidRequestError(
                f"lora_name: with this API key it must begin with {owner + '/'!r}",
                param="lora_name",
            )
        self._check_free(name)
        self._check_count(name, owner)
        try:
            entry = await asyncio.to_thread(self._read_below, name, path, owner)
        except AdapterError as error:
            raise InvalidRequestError(f"lora_path: {error}", param="lora_path") from error
        self._check_free(name)  # another call may have been faster
        await self._change(entry)
        return entry

    async def unload(self, name: str, owner: str = "") -> None:
        """Take a name away. Requests that run with it finish; workers drop it when they need room.

        Args:
            name: The model name.
            owner: The tenant that owns it; empty: an operator takes away anybody's.

        Raises:
            ModelNotFoundError: There is no adapter of that name, or the owner may not see it.
            ForbiddenError: The owner may use it, but it is everybody's.
            InvalidRequestError: It stands in the fleet file.
        """
        entry = self.find(name, owner or None)
        if entry is not None and owner and not entry.owner:
            raise ForbiddenError(f"lora_name: {name!r} is everybody's; an operator may unload it")
        if name in self._fixed:
            raise InvalidRequestError(
                f"lora_name: {name!r} stands in the fleet file (adapters.load); take it out there",
                param="lora_name",
            )
        if entry is None:
            raise ModelNotFoundError(f"no adapter {name[:200]!r} is loaded", param="lora_name")
        gone = AdapterEntry(name=name, owner=entry.owner, changed_ms=self._next_ms(name), gone=True)
        await self._change(gone)

    # --- sharing ---------------------------------------------------------------------------------

    def start(self, shared: AdapterSharedTable | None, file: Path | None = None) -> None:
        """Begin to share. Needs a running event loop.

        Args:
            shared: The table of all routers of the fleet, or None.
            file: JSON file that outlives this process, or None.
        """
        self._shared_table = shared
        self._file = file
        if file is not None and file.exists():
            self._adopt(_decode_file(file))
        if shared is not None:
            self._tasks.keep(lambda: self._follow(shared), "adapters")

    async def close(self) -> None:
        """Stop sharing."""
        await self._tasks.close()

    async def exchange(self, shared: AdapterSharedTable) -> None:
        """Take over what is newer in the shared table, and write what is newer in this one.

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

    async def _follow(self, shared: AdapterSharedTable) -> None:
        while True:
            try:
                await self.exchange(shared)
            except RegistryUnavailableError:
                _LOG.debug("registry away, going on with the adapters that are known")
            await asyncio.sleep(POLL_S)

    async def _change(self, entry: AdapterEntry) -> None:
        self._adopt([entry])
        if self._shared_table is not None:
            try:
                await self.exchange(self._shared_table)
            except RegistryUnavailableError as error:
                _LOG.warning("other routers see adapter %s later: %s", entry.name, error)

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

    # --- reading and checking --------------------------------------------------------------------

    def _read_below(self, name: str, path: str, owner: str) -> AdapterEntry:
        """An adapter that may lie in the adapter folder only, links followed."""
        if self._folder is None:
            raise AdapterError(
                "this fleet has only the adapters of its file; to load others, name their folder "
                "there: `adapters: {folder: FOLDER}`"
            )
        folder = (self._folder / owner).resolve()
        try:
            found = (folder / path).resolve()
        except (OSError, ValueError, RuntimeError) as error:  # a null byte, links in a circle
            raise AdapterError(f"{path[:200]!r}: cannot be read ({error})") from error
        if not found.is_relative_to(folder):
            raise AdapterError(f"{path[:200]!r} is not below {folder}")
        entry = self._read(name, str(found), self._next_ms(name))
        return msgspec.structs.replace(entry, owner=owner)

    def _check_count(self, name: str, owner: str) -> None:
        served = self.served()
        if len(served) >= MAX_NAMES:
            raise InvalidRequestError(f"{len(served)} adapters are loaded, no more are taken")
        own = sum(1 for entry in served if entry.owner == owner) if owner else 0
        if own >= MAX_NAMES_OF_A_TENANT:
            raise InvalidRequestError(f"{own} adapters of {owner} are loaded, no more are taken")
        known = [entry for entry in self._shared.values() if owner in ("", entry.owner)]
        most = MAX_REMEMBERED_OF_A_TENANT if owner else MAX_REMEMBERED
        if len(known) >= most and name not in self._shared:
            raise InvalidRequestError(
                f"lora_name: {len(known)} names were loaded or taken away within a day, the limit; "
                "take one of these names again, or wait",
                param="lora_name",
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
            raise InvalidRequestError(
                f"lora_name: must be 1 to {MAX_NAME_LENGTH} printable characters", param="lora_name"
            )
        if name in self._reserved:
            raise AdapterExistsError(
                f"lora_name: {name!r} is a name of the model itself", param="lora_name"
            )
        if self.find(name) is not None:
            raise AdapterExistsError(
                f"lora_name: an adapter {name!r} is loaded; unload it first", param="lora_name"
            )

    def _next_ms(self, name: str) -> int:
        known = self._shared.get(name)
        return max(_now_ms(), known.changed_ms + 1 if known else 0)


def _is_forgotten(entry: AdapterEntry) -> bool:
    """Whether the name was taken away so long ago that no router need know of it."""
    return entry.gone and entry.changed_ms < _now_ms() - _REMEMBER_GONE_MS


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _decode(raw: bytes) -> AdapterEntry | None:
    try:
        return msgspec.json.decode(raw, type=AdapterEntry)
    except msgspec.DecodeError:
        return None  # from another version


def _decode_file(file: Path) -> list[AdapterEntry]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[AdapterEntry])
    except (OSError, msgspec.DecodeError) as error:
        _LOG.warning("cannot read the adapters in %s: %s", file, error)
        return []
