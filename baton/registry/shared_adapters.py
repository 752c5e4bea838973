"""Table in Redis of the LoRA adapters that clients may use.

A fleet of an earlier version has an entry for each adapter, with the time of its change: in the key
``adapters``, which expires after a day, and in the copies on disk.
"""

from collections.abc import Iterable, Mapping

import msgspec

from baton.registry.redis_store import Registry
from baton.registry.shared_tables import VersionedTable
from baton.types.params import AdapterRef
from baton.types.versioned import Versioned


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of the table.

    Attributes:
        owner: Tenant that loaded the adapter for itself; empty: all tenants may use it.
        changed_ms: Unix time at which it was loaded; 0: it is in the fleet file.
    """

    name: str
    owner: str = ""
    digest: str = ""  # hexadecimal
    path: str = ""
    rank: int = 0
    targets: tuple[str, ...] = ()
    changed_ms: int = 0

    def ref(self) -> AdapterRef:
        """Return the reference that is sent to workers."""
        return AdapterRef(self.name, self.digest, self.path)


class LoadedAdapters(Versioned, frozen=True):
    """Adapters that were loaded at run time, by name."""

    entries: Mapping[str, AdapterEntry] = {}


class _EarlierEntry(AdapterEntry, frozen=True, kw_only=True):
    gone: bool = False


class SharedAdapters(VersionedTable[LoadedAdapters]):
    """Key ``adapters:table``: adapters that were loaded at run time."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(registry, "adapters:table", LoadedAdapters, {"table": "entries"})
        self._earlier = registry.key("adapters")
        self._is_first_read = True

    async def read(self, known: LoadedAdapters) -> tuple[LoadedAdapters | None, int]:
        """Return the table as `VersionedTable` does, or that of an earlier version."""
        table, now_ms = await super().read(known)
        if self._is_first_read and table is not None and not table.version:
            (raws,) = await self._registry.send(("HVALS", self._earlier))
            table = _table_of(filter(None, map(_earlier_entry, raws)))
        self._is_first_read = False
        return table, now_ms

    def decoded(self, raw: bytes) -> LoadedAdapters:
        """Decode a copy on disk."""
        if raw.startswith(b"["):
            return _table_of(msgspec.json.decode(raw, type=list[_EarlierEntry]))
        return super().decoded(raw)


def _earlier_entry(raw: bytes) -> _EarlierEntry | None:
    try:
        return msgspec.json.decode(raw, type=_EarlierEntry)
    except msgspec.DecodeError:
        return None


def _table_of(entries: Iterable[_EarlierEntry]) -> LoadedAdapters:
    """Return the table of an earlier version's entries; unloaded ones are ``gone``."""
    known = list(entries)
    kept = {
        entry.name: msgspec.convert(entry, AdapterEntry, from_attributes=True)
        for entry in known
        if not entry.gone
    }
    version = max((entry.changed_ms for entry in known), default=0)
    return LoadedAdapters(version=version, entries=kept)
