"""Leases of a tenant's limits at one router: sans-IO."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta

from baton.tenants.bank import CONCURRENT_RETRY_MS, SILENT_MS, LimitPart, Need

_USE_NS = 1_000_000_000  # a lease covers twice the use of this time
_PART_LEASED = 4  # of what is left, at most one part is leased before calls need it
_ANSWERS = 100  # of which the 90th percentile is expected
_MS = 1_000_000
_DAY_MS = 24 * 3600 * 1000
KINDS = {
    "rpm": (2000, 31),  # length of a slot in ms, and number of slots: at least 60 s
    "tpm": (2000, 31),
    "tpd": (_DAY_MS, 1),
    "concurrent": (1, 0),
    "budget": (_DAY_MS, 1),  # use of a month counts in its last day, and so until its end
}
TOKENS = ("tpm", "tpd", "budget")


def last_day_of_month(unix_ms: int) -> int:
    """Return the last day of the calendar month (UTC) of a time, in days since 1970."""
    first = datetime.fromtimestamp(unix_ms / 1000, UTC).date().replace(day=1)
    next_first = (first + timedelta(days=31)).replace(day=1)
    return (next_first - date(1970, 1, 1)).days - 1


@dataclass(slots=True, eq=False)
class Lease:
    """Lease of one limit.

    Attributes:
        taken_total: All that calls took; unlike ``spent_total`` it never falls.
        used: Use by slot; ``changed``: slots that the bank does not have, with the exchange before.
        asked: Amount that calls lacked since the last exchange.
        recent: ``taken_total`` at times of the last second.
        left, elsewhere, wait_until_ns, reset_ns: What the bank answered; ``left`` with refunds
            and debts since then.
        unseen: Refunds less debts since the last exchange was sent, which its answer lacks.
    """

    kind: str
    limit: int
    spent_total: int = 0
    ceiling: int = 0
    taken_total: int = 0
    used: dict[int, int] = field(default_factory=dict)
    changed: dict[int, int] = field(default_factory=dict)
    asked: int = 0
    recent: deque[tuple[int, int]] = field(default_factory=deque)
    left: int = 0
    elsewhere: int = 0
    unseen: int = 0
    wait_until_ns: int = 0
    reset_ns: int = 0

    @property
    def have(self) -> int:
        """Amount that calls may take."""
        return max(self.ceiling - self.spent_total, 0)

    def slot(self, bank_ms: int) -> int:
        """Return the slot in which use counts at this time."""
        if self.kind == "budget":
            return last_day_of_month(bank_ms)
        slot_ms, slots = KINDS[self.kind]
        return bank_ms // slot_ms if slots else 0

    def note(self, slot: int, amount: int, sequence: int) -> None:
        """Count use in a slot."""
        self.used[slot] = self.used.get(slot, 0) + amount
        self.changed[slot] = sequence

    def free(self, amount: int) -> None:
        """Note a refund; below 0: a debt."""
        self.left += amount
        self.unseen += amount

    def counts(self, slot: int, bank_ms: int) -> bool:
        """Return whether the use of a slot counts at this time."""
        slot_ms, slots = KINDS[self.kind]
        return not slots or (slot + slots) * slot_ms > bank_ms

    @property
    def is_refused(self) -> bool:
        """State after an exchange in which the bank lacked something that is still missing."""
        return self.wait_until_ns > 0 and self.left + self.elsewhere <= 0

    @property
    def in_use(self) -> bool:
        """Presence of use in the second before the last exchange, or after it."""
        return self.taken_total > (self.recent[0][1] if self.recent else 0)

    def wanted(self, ahead: int, now_ns: int) -> int:
        """Return the amount to lease, at least ``ahead`` if it is left; note the use until now."""
        self.recent.append((now_ns, self.taken_total))
        while len(self.recent) > 1 and self.recent[1][0] <= now_ns - _USE_NS:
            self.recent.popleft()
        use = self.taken_total - self.recent[0][1]
        return max(self.asked, min(max(2 * use, ahead), max(self.left, 0) // _PART_LEASED))


@dataclass(slots=True, eq=False)
class TenantLeases:
    """Leases of one tenant, and what its answers let expect."""

    offset_ms: int
    known: dict[str, Lease] = field(default_factory=dict)  # of all limits it ever had
    leases: dict[str, Lease] = field(default_factory=dict)  # of the limits it has
    smallest_limit: int = 0
    sequence: int = 0  # an answer with another one is late
    sent_ns: int = 0
    silent_ms: int = SILENT_MS  # by the exchange that was sent last
    acknowledged_ns: int = 0  # when the exchange was sent that the bank answered last
    valid_until_ns: int = 0  # before the bank takes the lease back
    whole: bool = True
    called: bool = False
    stirred: bool = True  # it may be busy; else it is not, and few steps find that out
    watched_until_ns: int = 0
    open: int = 0
    answers: deque[int] = field(default_factory=lambda: deque(maxlen=_ANSWERS))
    likely_tokens: int = 0
    alone: bool = False  # it counts against this router's part of the limits

    def bank_ms(self, now_ns: int) -> int:
        """Return the time of the bank."""
        return self.offset_ms + now_ns // _MS

    def is_valid(self, now_ns: int) -> bool:
        """Return whether the bank cannot have taken the leases back."""
        return now_ns < self.valid_until_ns

    def learn(self, answer_tokens: int) -> None:
        """Note the length of an answer."""
        self.answers.append(answer_tokens)
        self.likely_tokens = sorted(self.answers)[len(self.answers) * 9 // 10]

    def expected(self, most_tokens: int) -> int:
        """Return the expected length of an answer."""
        return min(most_tokens, self.likely_tokens) if self.answers else most_tokens


def own_part(need: Need, used: Mapping[int, int], now_ms: int) -> LimitPart:
    """Return what a router without Redis has of ``need``, whose limit is that of this router.

    ``used``: use by slot that counts.
    """
    free = need.limit - sum(used.values())
    ceiling = need.spent_total + max(min(need.ceiling - need.spent_total, free), 0)
    left = free - (ceiling - need.spent_total)
    wait_ms = 0
    if need.ceiling > ceiling:
        missing = need.ceiling - ceiling - left
        wait_ms = SILENT_MS if need.slots else CONCURRENT_RETRY_MS
        for slot in sorted(used) if need.slots else ():
            if missing <= 0:
                break
            missing -= used[slot]
            wait_ms = max((slot + need.slots) * need.slot_ms - now_ms, 1)
    last = max((slot for slot, amount in used.items() if amount > 0), default=0)
    reset_ms = max((last + need.slots) * need.slot_ms - now_ms, 0) if last else 0
    return LimitPart(ceiling=ceiling, left=left, wait_ms=wait_ms, reset_ms=reset_ms)
