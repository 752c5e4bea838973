"""Bank of one tenant's limits in Python, the oracle for the script in Redis."""

from collections.abc import Iterator

import msgspec

from baton.tenants.bank import CONCURRENT_RETRY_MS, SILENT_MS, SLACK_MS, Ask, Grant, LimitPart, Need


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

    def _granted(self, mine: _Router, name: str, need: Need) -> LimitPart:
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
        return LimitPart(
            ceiling=account.ceiling,
            left=left,
            wait_ms=wait_ms,
            reset_ms=reset_ms,
            elsewhere=elsewhere,
        )

    def _used(self, name: str, need: Need) -> dict[int, int]:
        """Return the use of all routers by slot, without slots that no longer count."""
        used: dict[int, int] = {}
        for router in self._routers.values():
            account = router.accounts.get(name)
            if account is None:
                continue
            for slot, amount in list(account.used.items()):
                if need.slots and (slot + need.slots) * need.slot_ms <= self._now_ms:
                    del account.used[slot]
                else:
                    used[slot] = used.get(slot, 0) + amount
        return used

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
