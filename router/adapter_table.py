"""LoRA adapters that clients may use: those of the fleet file, and those loaded at run time.

Routers share the latter through Redis. Any router can load an adapter, and the others follow within
a second.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from baton.model.artifact import ModelConfig
from baton.model.lora_artifact import AdapterError, read_adapter
from baton.registry.redis_store import RegistryUnavailableError
from baton.registry.shared_adapters import AdapterEntry, LoadedAdapters, SharedAdapters
from baton.types.errors import (
    AdapterExistsError,
    ForbiddenError,
    InvalidRequestError,
    ModelNotFoundError,
    UnavailableError,
)
from baton.types.versioned import TableChangeError
from router.synced_table import SyncedVersions

MAX_NAMES = 1024
MAX_NAMES_OF_A_TENANT = 64
MAX_NAME_LENGTH = 200


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
        self._fixed = {name: self._read(name, path) for name, path in (load or {}).items()}
        self._loaded: Mapping[str, AdapterEntry] = {}
        self._synced: SyncedVersions[LoadedAdapters] | None = None

    def find(self, name: str, tenant: str | None = None) -> AdapterEntry | None:
        """Return the adapter of this name that the tenant may use (None: any tenant)."""
        entry = self._fixed.get(name) or self._loaded.get(name)
        if entry is None or name in self._reserved:
            return None
        return entry if tenant is None or entry.owner in ("", tenant) else None

    def served(self, tenant: str | None = None) -> list[AdapterEntry]:
        """Return all adapters that the tenant may use (None: any tenant)."""
        names = sorted(self._fixed.keys() | self._loaded.keys())
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
            UnavailableError: Redis does not answer; nothing has changed.
        """
        if owner and not name.startswith(f"{owner}/"):
            raise InvalidRequestError.at(
                "lora_name", f"must begin with {owner + '/'!r} with this API key"
            )
        self._check_free(name)
        self._check_count(owner)
        try:
            entry = await asyncio.to_thread(self._read_below, name, path, owner)
        except AdapterError as error:
            raise InvalidRequestError.at("lora_path", f"{error}") from error

        def with_entry(entries: Mapping[str, AdapterEntry]) -> dict[str, AdapterEntry]:
            self._check_free(name)  # a concurrent call may have used it
            self._check_count(owner)
            return {**entries, name: entry}

        await self._change(with_entry)
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
            UnavailableError: Redis does not answer; nothing has changed.
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
        await self._change(lambda all_: {n: kept for n, kept in all_.items() if n != name})

    async def start(
        self,
        shared: SharedAdapters | None,
        file: Path | None = None,
        count_failure: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start sharing, and keep the table in ``file``."""
        if shared is not None:
            synced = SyncedVersions("adapters", shared, LoadedAdapters(), file, count_failure)
            synced.on_table.append(self._use)
            self._synced = synced
            await synced.start()

    async def close(self) -> None:
        """Stop sharing the table."""
        if self._synced is not None:
            await self._synced.close()

    async def _change(
        self, edit: Callable[[Mapping[str, AdapterEntry]], Mapping[str, AdapterEntry]]
    ) -> None:
        """Change the loaded adapters of all routers."""
        if self._synced is None:
            self._loaded = edit(self._loaded)
            return
        try:
            await self._synced.change(
                lambda table, _: msgspec.structs.replace(table, entries=edit(table.entries))
            )
        except (RegistryUnavailableError, TableChangeError) as error:
            raise UnavailableError(
                f"adapters stay as they are, because they are shared through Redis: {error}; "
                "repeat the call"
            ) from error

    def _use(self, table: LoadedAdapters) -> None:
        self._loaded = table.entries

    def _read_below(self, name: str, path: str, owner: str) -> AdapterEntry:
        """Read an adapter that must be below the adapter folder after resolving links."""
        if self._folder is None:
            raise AdapterError(
                "adapters cannot be loaded at run time; set `adapters: {folder: FOLDER}` in the "
                "fleet file"
            )
        folder = (self._folder / owner).resolve()
        try:
            resolved = (folder / path).resolve()
        except (OSError, ValueError, RuntimeError) as error:  # a null byte, or a loop of links
            raise AdapterError(f"{path[:200]!r}: cannot be read ({error})") from error
        if not resolved.is_relative_to(folder):
            raise AdapterError(f"{path[:200]!r} is not below {folder}")
        entry = self._read(name, str(resolved))
        return msgspec.structs.replace(entry, owner=owner, changed_ms=time.time_ns() // 10**6)

    def _check_count(self, owner: str) -> None:
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

    def _read(self, name: str, path: str) -> AdapterEntry:
        if not self._max_loaded:
            raise AdapterError("this fleet serves no adapters (adapters.max_loaded is 0)")
        artifact = read_adapter(path, self._config, self._max_rank)
        return AdapterEntry(
            name=name,
            digest=artifact.digest.hex(),
            path=str(artifact.path.resolve()),
            rank=artifact.rank,
            targets=artifact.targets,
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
