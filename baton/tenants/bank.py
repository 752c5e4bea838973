"""Bank of one tenant's limits, from which routers lease parts: a pure function, sans-IO.

    limit ≥ used in the window, by all routers + leased and not yet spent

Amounts that routers report are totals, so a lost, late or repeated exchange changes nothing:
``spent_total`` counts all that a router ever took from its leases, ``ceiling`` is the value that it
may reach. Use counts in slots of time; a refund lowers the slot of the request that caused it.
The script in ``quotas.py`` computes the same in Redis.
"""

from collections.abc import Iterator

import msgspec

SILENT_MS = 2000
"""Silence after which the unspent lease of a router with calls returns."""
SLACK_MS = 1000
"""Time by which the clock may seem faster than a router's own."""
CONCURRENT_RETRY_MS = 1000


class Need(msgspec.Struct, kw_only=True):
    """Report and wish of a router for one limit.

    Attributes:
        slot_ms: Length of a slot.
        slots: Number of slots that count; 0: use counts until it is reported as 0.
        ceiling: Wanted value of the ceiling.
        used: Changed slots, with their total use at this router.
    """

    limit: int
    slot_ms: int
    slots: int
    spent_total: int
    ceiling: int
    used: dict[str, int]


class Ask(msgspec.Struct, kw_only=True):
    """One exchange of a router for one tenant.

    Attributes:
        router: Id of one life of a router.
        elapsed_ms: Time since the router's previous exchange, by its own clock.
        whole: Whether ``used`` has all slots, and no lease is open.
        silent_ms: Silence after which the router's unspent lease returns.
    """

    router: str
    sequence: int
    elapsed_ms: int
    whole: bool
    needs: dict[str, Need]
    silent_ms: int = SILENT_MS


class Part(msgspec.Struct, kw_only=True):
    """State of one limit after an exchange.

    Attributes:
        left: Amount that no router uses or leases; below 0: use exceeds the limit.
        elsewhere: Amount that other routers lease. They return what their calls do not use.
        wait_ms: Time until the missing part of the wish is free; 0: nothing is missing.
        reset_ms: Time until all use is forgotten.
    """

    ceiling: int
    left: int
    wait_ms: int
    reset_ms: int
    elsewhere: int = 0


class Grant(msgspec.Struct, kw_only=True):
    """Answer to an `Ask`; without ``parts`` the ask had no effect.

    Attributes:
        now_ms: Time of the bank.
        unknown: Whether the router must send a whole report.
    """

    sequence: int
    now_ms: int
    unknown: bool = False
    parts: dict[str, Part] = {}


class _Account(msgspec.Struct):
    spent_total: int = 0
    ceiling: int = 0
    used: dict[int, int] = {}


class _Router(msgspec.Struct):
    sequence: int = 0
    seen_ms: int = 0
    silent_ms: int = SILENT_MS
    accounts: dict[str, _Account] = {}


class Bank:
    """Leases and use of one tenant. Its time does not follow steps of the clock."""

    def __init__(self) -> None:
        self._now_ms = 0
        self._clock_ms = 0
        self._routers: dict[str, _Router] = {}

    def exchange(self, ask: Ask, clock_ms: int) -> Grant:
        """Apply the report of one router, and grant as much of its wish as is free."""
        known = self._routers.get(ask.router)
        if not self._clock_ms:
            self._now_ms = clock_ms
        else:
            passed_ms = max(clock_ms - self._clock_ms, 0)
            if known is not None:
                passed_ms = min(passed_ms, ask.elapsed_ms + SLACK_MS)
            self._now_ms += passed_ms
        self._clock_ms = clock_ms
        self._end_silent()
        mine = self._routers.get(ask.router)
        if mine is None and not ask.whole:
            return Grant(sequence=ask.sequence, now_ms=self._now_ms, unknown=True)
        if mine is not None and ask.sequence <= mine.sequence:
            return Grant(sequence=ask.sequence, now_ms=self._now_ms)
        if mine is None or ask.whole:
            mine = self._routers[ask.router] = _Router()
        mine.sequence = ask.sequence
        mine.silent_ms = ask.silent_ms
        mine.seen_ms = self._now_ms
        parts = {name: self._granted(mine, name, need) for name, need in ask.needs.items()}
        return Grant(sequence=ask.sequence, now_ms=self._now_ms, parts=parts)

    def _end_silent(self) -> None:
        """Take the leases of silent routers back, and forget routers without use."""
        for name, router in list(self._routers.items()):
            if router.seen_ms + router.silent_ms >= self._now_ms:
                continue
            for account in router.accounts.values():
                account.ceiling = account.spent_total
                account.used.pop(0, None)
            if not any(account.used for account in router.accounts.values()):
                del self._routers[name]

    def _granted(self, mine: _Router, name: str, need: Need) -> Part:
        account = mine.accounts.setdefault(name, _Account())
        account.spent_total = need.spent_total
        account.ceiling = max(account.ceiling, account.spent_total)
        for slot, amount in need.used.items():
            account.used[int(slot)] = amount
        lower = max(min(account.ceiling, need.ceiling), account.spent_total)
        account.ceiling = lower
        used = self._used(name, need)
        leased = self._leased(name)
        elsewhere = leased - (lower - account.spent_total)
        left = need.limit - sum(used.values()) - leased
        granted = max(min(need.ceiling - lower, left), 0)
        account.ceiling += granted
        left -= granted
        missing = need.ceiling - account.ceiling - left
        wait_ms = 0
        if need.ceiling > account.ceiling:
            wait_ms = self._wait_ms(used, missing - elsewhere, need)
        last = max(
            (slot for slot, amount in self._entries(name) if amount > 0),
            default=0,
        )
        reset_ms = max((last + need.slots) * need.slot_ms - self._now_ms, 0) if last else 0
        return Part(
            ceiling=account.ceiling,
            left=left,
            wait_ms=wait_ms,
            reset_ms=reset_ms,
            elsewhere=elsewhere,
        )

    def _used(self, name: str, need: Need) -> dict[int, int]:
        """Return the use of all routers by slot, without slots that no longer count."""
        found: dict[int, int] = {}
        for router in self._routers.values():
            account = router.accounts.get(name)
            if account is None:
                continue
            for slot, amount in list(account.used.items()):
                if need.slots and (slot + need.slots) * need.slot_ms <= self._now_ms:
                    del account.used[slot]
                else:
                    found[slot] = found.get(slot, 0) + amount
        return found

    def _entries(self, name: str) -> Iterator[tuple[int, int]]:
        for router in self._routers.values():
            if name in router.accounts:
                yield from router.accounts[name].used.items()

    def _leased(self, name: str) -> int:
        accounts = [router.accounts.get(name) for router in self._routers.values()]
        return sum(one.ceiling - one.spent_total for one in accounts if one is not None)

    def _wait_ms(self, used: dict[int, int], missing: int, need: Need) -> int:
        if not need.slots:
            return CONCURRENT_RETRY_MS
        wait_ms = SILENT_MS
        for slot in sorted(used):
            if missing <= 0:
                break
            missing -= used[slot]
            wait_ms = max((slot + need.slots) * need.slot_ms - self._now_ms, 1)
        return wait_ms
