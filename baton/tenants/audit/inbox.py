"""Audit log in Redis: entries on their way to the file, and its last line.

audit:inbox    list of entries of processes that are not on the host of the file
audit:head     hash: seq and sha256 of the last line of the file
"""

import msgspec

from baton.registry.redis_store import Registry
from baton.tenants.audit.chain import ChainHead, Entry

_MOST = 10_000  # entries; the oldest are removed first
_AT_ONCE = 200

# KEYS: head. ARGV: seq, sha256. A shorter file does not replace the head of a longer one.
_NOTE = """
if tonumber(redis.call('HGET', KEYS[1], 'seq') or '0') < tonumber(ARGV[1]) then
  redis.call('HSET', KEYS[1], 'seq', ARGV[1], 'sha256', ARGV[2])
end
return 1
"""


class AuditInbox:
    """Entries and head in Redis. Every call may raise ``RegistryUnavailableError``."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._inbox = registry.key("audit", "inbox")
        self._head = registry.key("audit", "head")

    async def put(self, entry: Entry) -> None:
        """Add an entry."""
        await self._registry.send(
            ("RPUSH", self._inbox, msgspec.json.encode(entry)),
            ("LTRIM", self._inbox, -_MOST, -1),
        )

    async def waiting(self) -> list[bytes]:
        """Return the oldest entries, encoded."""
        (raw,) = await self._registry.send(("LRANGE", self._inbox, 0, _AT_ONCE - 1))
        return list(raw)

    async def remove(self, entries: list[bytes]) -> None:
        """Remove entries that are in the file, or unreadable."""
        await self._registry.send(*(("LREM", self._inbox, 1, entry) for entry in entries))

    async def note(self, head: ChainHead) -> None:
        """Record the last line of the file."""
        await self._registry.send(("EVAL", _NOTE, 1, self._head, head.seq, head.sha256))

    async def head(self) -> ChainHead | None:
        """Return the recorded last line; None if there is no record."""
        (raw,) = await self._registry.send(("HMGET", self._head, "seq", "sha256"))
        return None if raw[0] is None else ChainHead(int(raw[0]), raw[1].decode())
