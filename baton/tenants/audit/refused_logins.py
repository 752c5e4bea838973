"""Sample of refused logins for the audit log. The time of a minute is an argument."""

from functools import partial

from baton.tenants.audit.chain import Entry

PER_MINUTE = 10
_MINUTE_NS = 60_000_000_000


class RefusedLogins:
    """Entries of the first refused logins of each minute, and the number of the others."""

    def __init__(self) -> None:
        self._until_ns = 0
        self._count = 0
        self._entries: list[Entry] = []

    def note(self, source: str, call: str, reason: str, now_ns: int) -> None:
        """Note a refused login.

        ``source``: address of the caller. ``call``: method and path. ``reason``: error message,
        which has no secret.
        """
        self._end_minute(now_ns)
        if not self._count:
            self._until_ns = now_ns + _MINUTE_NS
        self._count += 1
        if self._count <= PER_MINUTE:
            after = {"reason": reason}
            self._entries.append(_refused(what=call, source=source, after=after))

    def take(self, now_ns: int) -> list[Entry]:
        """Return new entries."""
        self._end_minute(now_ns)
        entries = self._entries
        self._entries = []
        return entries

    def _end_minute(self, now_ns: int) -> None:
        if self._count and now_ns >= self._until_ns:
            if (more := self._count - PER_MINUTE) > 0:
                after = {"left_out": more}
                self._entries.append(_refused(after=after))
            self._count = 0


_refused = partial(Entry, verb="login refused", who="unknown")
