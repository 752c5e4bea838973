"""Issued API keys that one router accepts. Sans-IO: time is an argument.

A key is found by the id in its text, or by its hash if it was imported. Either costs one hash and
one comparison in constant time, whatever the number of keys.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hmac import compare_digest

from pydantic import ValidationError

from baton.config.clients import ApiKeyConfig
from baton.tenants.key_record import (
    KEY,
    STATES,
    KeyRecord,
    KeyState,
    decoded,
    hash_of,
    joined,
)
from baton.tenants.shared_keys import Change

DAY_MS = 24 * 3600 * 1000
_LONGEST_KEY = 1024  # characters of an imported key


@dataclass(slots=True, eq=False)
class IssuedKey:
    """A key that this router knows.

    Attributes:
        seen: Value in Redis that has this record; empty: none is known.
        used_day: Last day of use at this router, counted from 1970.
    """

    record: KeyRecord
    rights: ApiKeyConfig
    digest: bytes
    seen: bytes = b""
    used_day: int = 0


class KeyTable:
    """Issued keys by id and by hash.

    Attributes:
        changes: Number of changes of the table.
        used: Days of use that Redis does not have yet, by id.
        unreadable: Reasons why records of Redis cannot be used, by id.
        compared_s: Monotonic time of the last comparison with Redis; None: there was none.
    """

    def __init__(self) -> None:
        self._keys: dict[str, IssuedKey] = {}
        self._by_hash: dict[bytes, IssuedKey] = {}
        self._of_tenant: dict[str, list[IssuedKey]] = {}
        self._text_of_tenant: dict[str, list[IssuedKey]] = {}
        self.changes = 0
        self.used: dict[str, int] = {}
        self.unreadable: dict[str, str] = {}
        self.compared_s: float | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[IssuedKey]:
        return iter(self._keys.values())

    def __getitem__(self, key_id: str) -> IssuedKey:
        return self._keys[key_id]

    def get(self, key_id: str) -> IssuedKey | None:
        """Return the key with this id."""
        return self._keys.get(key_id)

    def find(self, spelled: str) -> IssuedKey | None:
        """Return the key with this text, valid or not; None if it is unknown."""
        form = KEY.fullmatch(spelled)
        if form is not None:
            digest = hash_of(spelled)
            key = self._keys.get(form[1])
        elif self._by_hash and len(spelled) <= _LONGEST_KEY:
            digest = hash_of(spelled)
            key = self._by_hash.get(digest)
        else:
            return None
        return key if key is not None and compare_digest(key.digest, digest) else None

    def is_ended(self, spelled: str, now_ms: int) -> bool:
        """Return whether a key is known and not valid, so that its line does not count."""
        key = self.find(spelled)
        return key is not None and key.record.state(now_ms) != "valid"

    def note_use(self, key: IssuedKey, now_ms: int) -> None:
        """Record the day of a use."""
        day = now_ms // DAY_MS
        if key.used_day != day:
            key.used_day = day
            self.used[key.record.id] = day

    def has(self, tenant: str) -> bool:
        """Return whether a tenant has keys, valid or not."""
        return bool(self._of_tenant.get(tenant))

    def of_tenant(self, tenant: str, now_ms: int) -> ApiKeyConfig | None:
        """Return the rights of a valid key of a tenant."""
        return next(_valid(self._of_tenant.get(tenant, ()), now_ms), None)

    def logs_text(self, tenant: str, now_ms: int) -> bool:
        """Return whether a valid key of a tenant has ``log_text``."""
        return any(_valid(self._text_of_tenant.get(tenant, ()), now_ms))

    def counts(self, now_ms: int) -> dict[KeyState, int]:
        """Count the keys by state."""
        counts = Counter(key.record.state(now_ms) for key in self)
        return {state: counts[state] for state in STATES}

    def adopt(self, record: KeyRecord) -> IssuedKey | None:
        """Join a record with this table's; return the key, or None if its rights are invalid."""
        key = self._keys.get(record.id)
        if key is not None:
            whole = joined(key.record, record)
            if whole != key.record:
                key.record = whole
                self.changes += 1
            return key
        try:
            rights = ApiKeyConfig.model_validate(record.rights)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            self.unreadable[record.id] = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            return None
        key = IssuedKey(record, rights, bytes.fromhex(record.sha256))
        self._keys[record.id] = key
        for group in self._groups(key):
            group.append(key)
        if record.by_hash:
            self._by_hash[key.digest] = key
        self.changes += 1
        return key

    def merge(self, raws: Mapping[str, bytes]) -> list[Change]:
        """Join records of Redis, by id; return those that are newer here."""
        newer = []
        for key_id, raw in raws.items():
            known = self._keys.get(key_id)
            if known is not None and known.seen == raw:
                continue
            theirs = decoded(raw)
            if theirs is None or theirs.id != key_id:
                self.unreadable[key_id] = "it is damaged"
                newer += [Change(raw, known.record)] if known is not None else []
                continue
            mine = self.adopt(theirs)
            if mine is None:
                continue
            if mine.record == theirs:
                mine.seen = raw
            else:
                newer.append(Change(raw, mine.record))
        return newer

    def missing(self, there: Container[str]) -> list[Change]:
        """Return the records that Redis lacks, given the ids that it has."""
        return [Change(b"", key.record) for name, key in self._keys.items() if name not in there]

    def forget(self, now_ms: int) -> list[str]:
        """Remove the records that expired long ago, and return their ids."""
        old = [key for key in self if key.record.is_forgotten(now_ms)]
        for key in old:
            del self._keys[key.record.id]
            self._by_hash.pop(key.digest, None)
            for group in self._groups(key):
                group.remove(key)
            self.used.pop(key.record.id, None)
            self.changes += 1
        return [key.record.id for key in old]

    def _groups(self, key: IssuedKey) -> list[list[IssuedKey]]:
        tenant = key.rights.tenant
        if key.rights.role == "metrics":  # sends no requests
            return []
        groups = [self._of_tenant.setdefault(tenant, [])]
        if key.rights.log_text:
            groups.append(self._text_of_tenant.setdefault(tenant, []))
        return groups


def _valid(keys: Iterable[IssuedKey], now_ms: int) -> Iterator[ApiKeyConfig]:
    return (key.rights for key in keys if key.record.state(now_ms) == "valid")
