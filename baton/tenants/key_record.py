"""Text and record of an issued API key.

    bt-ID-SECRET    ID: 12 characters of a-z and 0-9; SECRET: 256 random bits in 64 digits

A record has the SHA-256 of the whole key, never the key. Records are joined and never overwritten:
the end of a key can only come nearer. So copies agree after any order of exchanges, and a revoked
key never becomes valid again, however old a copy is.
"""

import hashlib
import re
import secrets
import string
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

KEY = re.compile(r"bt-([a-z0-9]{12})-[0-9a-f]{64}")
ID_CHARACTERS = 12
SECRET_BYTES = 32
FORGET_AFTER_MS = 30 * 24 * 3600 * 1000
"""Time after a key's first expiry, which all copies have, until its record is removed."""

_ALPHABET = string.ascii_lowercase + string.digits

KeyState = Literal["valid", "expired", "revoked"]
STATES: tuple[KeyState, ...] = ("valid", "expired", "revoked")


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Record of one key.

    Attributes:
        sha256: SHA-256 of the whole key in hexadecimal digits.
        rights: Fields of ``baton.config.clients.ApiKeyConfig``.
        expires_ms: Expiry that the key was created with, Unix time; 0: none.
        by_hash: Whether the key was imported and has no id in its text.
        replaced_by: Id of the key that replaces it.
        retires_ms: Earlier expiry of a replaced key; 0: none.
        revoked_ms: Time of the revocation; 0: not revoked.
    """

    id: Annotated[str, msgspec.Meta(pattern="^[a-z0-9]{12}$")]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    rights: dict[str, Any]
    created_ms: int
    expires_ms: int = 0
    by_hash: bool = False
    replaced_by: str = ""
    retires_ms: int = 0
    revoked_ms: int = 0

    @property
    def end_ms(self) -> int:
        """Time of expiry; 0: none."""
        return _earliest(self.expires_ms, self.retires_ms)

    def state(self, now_ms: int) -> KeyState:
        """Return whether the key is valid, and if not, why."""
        if self.revoked_ms:
            return "revoked"
        return "expired" if 0 < self.end_ms <= now_ms else "valid"

    def is_forgotten(self, now_ms: int) -> bool:
        """Return whether the record can be removed: each older copy is expired as well."""
        return 0 < self.expires_ms < now_ms - FORGET_AFTER_MS


def joined(copy: KeyRecord, other: KeyRecord) -> KeyRecord:
    """Return the record that has the earlier end of two copies, in either order."""
    first = min(copy, other, key=lambda record: (record.created_ms, record.sha256))
    return msgspec.structs.replace(
        first,
        replaced_by=max(copy.replaced_by, other.replaced_by),
        retires_ms=_earliest(copy.retires_ms, other.retires_ms),
        revoked_ms=_earliest(copy.revoked_ms, other.revoked_ms),
    )


def decoded(raw: bytes) -> KeyRecord | None:
    """Return a record from its JSON; None if it is damaged."""
    try:
        return msgspec.json.decode(raw, type=KeyRecord)
    except msgspec.DecodeError:
        return None


def new_key() -> str:
    """Return a new random key."""
    key_id = "".join(secrets.choice(_ALPHABET) for _ in range(ID_CHARACTERS))
    return f"bt-{key_id}-{secrets.token_hex(SECRET_BYTES)}"


def hash_of(key: str) -> bytes:
    """Return the SHA-256 of a key."""
    return hashlib.sha256(key.encode()).digest()


def issue(
    key: str, rights: Mapping[str, Any], *, created_ms: int = 0, expires_ms: int = 0
) -> KeyRecord:
    """Return the record of a key. The id of an imported key is the beginning of its hash."""
    form = KEY.fullmatch(key)
    digest = hash_of(key).hex()
    return KeyRecord(
        id=form[1] if form else digest[:ID_CHARACTERS],
        sha256=digest,
        rights=dict(rights),
        created_ms=created_ms,
        expires_ms=expires_ms,
        by_hash=form is None,
    )


def _earliest(one_ms: int, other_ms: int) -> int:
    return min(one_ms, other_ms) if one_ms and other_ms else one_ms or other_ms
