"""Limits of tenants at one router, which spends leased parts of them without asking: sans-IO.

The bank of a tenant is in Redis (``baton/tenants/quotas.py``). A router leases about
twice what the tenant used here in the last second. What calls do not use returns after a second. So
the sum of all routers cannot exceed a limit. Of a tenant without calls each router leases the limit
/ (8 x routers) ahead, so that the first call finds a lease; where little is left, less. Without
Redis a router counts its own calls against the limit / routers.

A call reserves its prompt and the answer that the tenant's last answers let expect. At its end,
`settle` corrects the reservation by the usage. Use above it is a debt, for which the bank grants
less until it is forgotten.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.tenants.bank import SILENT_MS, Ask, Grant, Need
from baton.tenants.limits import Limits
from baton.tenants.shared_limits import MAX_TENANTS
from router.tenants.lease import KINDS, TOKENS, Lease, TenantLeases, own_part

EXCHANGE_NS = 200_000_000
_MS = 1_000_000
_WATCH_NS = 5_000_000_000
_PART_AHEAD = 8  # of the limit, at most one part is leased by all routers before the first call
_IDLE_ROUNDS = 2  # rounds between two exchanges for a tenant without calls, or more,
_IDLE_PER_ROUND = 100  # so that a round has at most this many of them


@dataclass(slots=True, eq=False)
class QuotaReservation:
    """Part of a tenant's limits that one call has.

    Attributes:
        tokens: Reserved tokens; 0 without a limit of tokens.
        slots: Slot of each lease that it counts in.
    """

    state: TenantLeases
    tokens: int
    choices: int
    slots: list[tuple[Lease, int]]
    settled: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """The call does not fit now.

    Attributes:
        kind: Limit that it exceeds.
        asks: Whether an exchange with the bank may help, at once or when others returned leases.
    """

    ns: int
    kind: str
    limit: int
    asks: bool


@dataclass(frozen=True, slots=True)
class Never:
    """The call exceeds a limit alone."""

    kind: str
    limit: int
    amount: int


@dataclass(frozen=True, slots=True)
class Standing:
    """State of one limit, for headers and metrics.

    Attributes:
        used: Amount that calls have used or reserved at all routers; more than ``limit`` is a debt.
    """

    limit: int
    remaining: int
    reset_ns: int
    used: int


class Quotas:
    """Leases of all tenants with limits at one router.

    Args:
        router: Id of this life of the router.
        offset_ms: Unix time minus monotonic time, until the bank's clock is known.
    """

    def __init__(self, router: str, offset_ms: int = 0) -> None:
        self._router = router
        self._offset_ms = offset_ms
        self._tenants: dict[str, TenantLeases] = {}
        self._unlimited: dict[str, TenantLeases] = {}  # with use from when they had limits
        self._sequence = 0  # of all tenants: the banks ignore what is not newer
        self.routers = 0
        """Number of routers that share the limits without Redis; 0: Redis has the banks."""
        self.live_routers = 1
        """Number of routers that lease parts of the limits."""

    def set_limits(self, limits: Mapping[str, Limits]) -> None:
        """Replace the limits of all tenants.

        Leases of those that stay are kept. Use counts as long as usual, also if its limit is
        removed and set again.
        """
        before = self._tenants
        self._tenants = {}
        for tenant, its in limits.items():
            if not its.amounts:
                continue
            state = before.pop(tenant, None) or self._unlimited.pop(tenant, None)
            state = self._tenants[tenant] = state or TenantLeases(self._offset_ms)
            kinds = state.leases.keys()
            state.leases = {}
            for kind, limit in its.amounts.items():
                lease = state.known.setdefault(kind, Lease(kind, limit, left=limit))
                lease.limit = limit
                state.leases[kind] = lease
            state.smallest_limit = min(its.amounts.values())
            state.stirred = True
            if state.leases.keys() != kinds:
                state.whole = True
                state.sequence = self._next()  # an answer on its way has no effect
        for tenant, state in before.items():
            state.leases = {}
            state.alone = False
            if any(lease.used for lease in state.known.values()):
                self._unlimited[tenant] = state
        for tenant in list(self._unlimited)[:-MAX_TENANTS]:
            del self._unlimited[tenant]

    def forget(self, tenant: str) -> None:
        """Forget the use of a tenant that was deleted and has no limits."""
        self._unlimited.pop(tenant, None)

    def has_limits(self, tenant: str) -> bool:
        """Return whether calls of a tenant must `take`."""
        return tenant in self._tenants

    def take(
        self, tenant: str, prompt_tokens: int, choices: int, answer_tokens: int, now_ns: int
    ) -> QuotaReservation | Wait | Never | None:
        """Reserve what a call is expected to use; None: the tenant has no limits.

        ``prompt_tokens``: tokens of all prompts, each counted once. ``answer_tokens``: most tokens
        of one answer; 0: none, as for embeddings.
        """
        state = self._tenants.get(tenant)
        if state is None:
            return None
        state.called = state.stirred = True
        least = prompt_tokens + (choices if answer_tokens else 0)
        expected = prompt_tokens + choices * state.expected(answer_tokens)
        tokens = max(expected, least)
        for lease in state.leases.values():
            if lease.kind in TOKENS:
                if least > lease.limit:
                    return Never(lease.kind, lease.limit, least)
                tokens = min(tokens, self._limit(lease))
        valid = state.is_valid(now_ns)
        known = bool(state.acknowledged_ns) and now_ns < state.acknowledged_ns + EXCHANGE_NS
        short: list[Lease] = []
        reserved = tokens
        for lease in state.leases.values():
            have = lease.have if valid else 0
            is_tokens = lease.kind in TOKENS
            if have >= (tokens if is_tokens else 1):
                continue
            if is_tokens and known and lease.is_refused and have >= least:
                reserved = min(reserved, have)
                continue
            short.append(lease)
        if not short:
            return self._spend(state, reserved, choices, now_ns)
        spent_up = [lease for lease in short if known and lease.is_refused]
        if not spent_up:
            for lease in state.leases.values():
                lease.asked += tokens if lease.kind in TOKENS else 1
        lease = max(spent_up or short, key=lambda lease: lease.wait_until_ns)
        wait_ns = max(lease.wait_until_ns - now_ns, EXCHANGE_NS)
        return Wait(wait_ns, lease.kind, lease.limit, asks=not spent_up)

    def settle(
        self, reservation: QuotaReservation, prompt_tokens: int, answered: int, now_ns: int
    ) -> None:
        """Correct a reservation by the usage of its call, which has ended.

        ``reservation``: reservation; only the first call for it counts. ``answered``: tokens of all
        answers.
        """
        if reservation.settled:
            return
        reservation.settled = True
        state = reservation.state
        state.open -= 1
        state.stirred = True
        bank_ms = state.bank_ms(now_ns)
        more = prompt_tokens + answered - reservation.tokens
        if answered:
            state.learn(-(-answered // reservation.choices))
        for lease, slot in reservation.slots:
            if lease.kind == "concurrent":
                lease.note(slot, -1, state.sequence)
                lease.spent_total -= 1
            elif lease.kind not in TOKENS:
                continue
            elif more > 0:
                leased = min(more, lease.have)
                lease.spent_total += leased
                lease.free(leased - more)
                lease.note(lease.slot(bank_ms), more, state.sequence)
            elif more < 0 and lease.counts(slot, bank_ms):
                lease.note(slot, more, state.sequence)
                lease.free(-more)

    def asks(self, now_ns: int) -> dict[str, Ask]:
        """Return an exchange for each tenant with use or calls, and for some of the others."""
        asks = {}
        idle = 0
        idle_ns = self._idle_ms * _MS
        for tenant, state in self._tenants.items():
            state.stirred = state.stirred and self._is_busy(state, now_ns)
            if state.stirred:
                asks[tenant] = self._ask(state, SILENT_MS, now_ns)
            elif idle < _IDLE_PER_ROUND and self._is_stale(state, idle_ns, now_ns):
                silent_ms = max(2 * SILENT_MS, 4 * self._idle_ms)
                asks[tenant] = self._ask(state, silent_ms, now_ns)
                idle += 1
        return asks

    def granted(self, grants: Mapping[str, Grant], now_ns: int) -> None:
        """Apply the answers of the bank; late ones have no effect."""
        for tenant, grant in grants.items():
            state = self._tenants.get(tenant)
            if state is None or grant.sequence != state.sequence:
                continue
            if grant.unknown:
                state.whole = True
            if grant.parts:
                self._apply(state, grant, now_ns)

    def leave_redis(self, routers: int) -> None:
        """Count here, against this router's part of all limits."""
        if not self.routers:
            for state in self._tenants.values():
                state.alone = False
        self.routers = max(routers, 1)

    def return_to_redis(self) -> None:
        """Lease from the banks in Redis again, which get all use of the meantime."""
        if self.routers:
            self.routers = 0
            for state in self._tenants.values():
                state.alone = False
                state.whole = True

    def exchange_here(self, now_ns: int) -> None:
        """Lease from this router's part of the limits. A valid lease of Redis is used up first."""
        for tenant, state in self._tenants.items():
            asked = any(lease.asked for lease in state.leases.values())
            if not state.alone:
                if state.is_valid(now_ns) and not asked:
                    continue
                state.alone = True
                state.whole = True
            if self._is_busy(state, now_ns):
                ask = self._ask(state, SILENT_MS, now_ns)
                now_ms = state.bank_ms(now_ns)
                parts = {
                    kind: own_part(need, state.leases[kind].used, now_ms)
                    for kind, need in ask.needs.items()
                }
                grant = Grant(sequence=ask.sequence, now_ms=now_ms, parts=parts)
                self.granted({tenant: grant}, now_ns)

    def standing(self, tenant: str, now_ns: int) -> dict[str, Standing]:
        """Return the state of each limit of a tenant."""
        state = self._tenants.get(tenant)
        if state is None:
            return {}
        standings = {}
        for lease in state.leases.values():
            limit = self._limit(lease)
            reset_ns = max(lease.reset_ns - now_ns, 0)
            left = lease.have + lease.left + lease.elsewhere
            left = min(left, limit) if reset_ns else limit
            standings[lease.kind] = Standing(lease.limit, max(left, 0), reset_ns, limit - left)
        return standings

    def watch(self, tenants: Iterable[str], now_ns: int) -> None:
        """Have the state of these tenants exchanged for some seconds, although they do not call."""
        for tenant in tenants:
            state = self._tenants.get(tenant)
            if state is not None:
                state.watched_until_ns = now_ns + _WATCH_NS
                state.stirred = True

    def callers(self) -> list[str]:
        """Return the tenants that called, and whose state this router has exchanged."""
        return [
            name for name, state in self._tenants.items() if state.acknowledged_ns and state.called
        ]

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _limit(self, lease: Lease) -> int:
        return max(lease.limit // self.routers, 1) if self.routers else lease.limit

    def _spend(
        self, state: TenantLeases, tokens: int, choices: int, now_ns: int
    ) -> QuotaReservation:
        bank_ms = state.bank_ms(now_ns)
        slots = []
        for lease in state.leases.values():
            amount = tokens if lease.kind in TOKENS else 1
            slot = lease.slot(bank_ms)
            lease.spent_total += amount
            lease.taken_total += amount
            lease.note(slot, amount, state.sequence)
            slots.append((lease, slot))
            if not lease.reset_ns > now_ns:
                slot_ms, counted = KINDS[lease.kind]
                lease.reset_ns = now_ns + ((slot + counted) * slot_ms - bank_ms) * _MS
        state.open += 1
        return QuotaReservation(state, tokens, choices, slots)

    @property
    def _idle_ms(self) -> int:
        """Return the time between two exchanges for a tenant without calls."""
        rounds = max(-(-len(self._tenants) // _IDLE_PER_ROUND), _IDLE_ROUNDS)
        return rounds * EXCHANGE_NS // _MS

    def _ahead(self, state: TenantLeases, lease: Lease) -> int:
        """Return the amount to lease ahead of calls; none if a call would lack another limit."""
        parts = _PART_AHEAD * self.live_routers
        if self.routers or state.smallest_limit < parts:
            return 0
        return lease.limit // parts

    def _is_busy(self, state: TenantLeases, now_ns: int) -> bool:
        if state.open or now_ns < state.watched_until_ns:
            return True
        return any(
            lease.asked or lease.changed or lease.in_use or lease.have > self._ahead(state, lease)
            for lease in state.leases.values()
        )

    def _is_stale(self, state: TenantLeases, idle_ns: int, now_ns: int) -> bool:
        was_busy = state.silent_ms == SILENT_MS
        if not was_busy and now_ns < state.sent_ns + idle_ns:
            return False
        if state.smallest_limit >= _PART_AHEAD * self.live_routers:
            return True
        return any(lease.used for lease in state.leases.values())  # Redis may have lost it

    def _ask(self, state: TenantLeases, silent_ms: int, now_ns: int) -> Ask:
        if not state.is_valid(now_ns):
            state.whole = True  # the bank may have taken the lease back
        needs = {}
        bank_ms = state.bank_ms(now_ns)
        for kind, lease in state.leases.items():
            ceiling = lease.spent_total + lease.wanted(self._ahead(state, lease), now_ns)
            lease.asked = lease.unseen = 0
            for slot in [slot for slot in lease.used if not lease.counts(slot, bank_ms)]:
                del lease.used[slot]
                lease.changed.pop(slot, None)
            lease.ceiling = lease.spent_total if state.whole else min(lease.ceiling, ceiling)
            names = lease.used if state.whole else lease.changed
            slot_ms, slots = KINDS[kind]
            needs[kind] = Need(
                limit=self._limit(lease),
                slot_ms=slot_ms,
                slots=slots,
                spent_total=lease.spent_total,
                ceiling=ceiling,
                used={str(slot): lease.used[slot] for slot in names},
            )
        state.sequence = self._next()
        elapsed_ms = (now_ns - (state.acknowledged_ns or now_ns)) // _MS
        state.sent_ns = now_ns
        state.silent_ms = silent_ms
        state.valid_until_ns = min(state.valid_until_ns, _valid_until_ns(now_ns, silent_ms))
        return Ask(
            router=self._router,
            sequence=state.sequence,
            elapsed_ms=elapsed_ms,
            whole=state.whole,
            needs=needs,
            silent_ms=silent_ms,
        )

    def _apply(self, state: TenantLeases, grant: Grant, now_ns: int) -> None:
        state.whole = False
        state.acknowledged_ns = state.sent_ns
        state.valid_until_ns = _valid_until_ns(state.sent_ns, state.silent_ms)
        # Not earlier than the bank's time, so that use counts for long enough.
        state.offset_ms = grant.now_ms - state.sent_ns // _MS
        for kind, part in grant.parts.items():
            lease = state.leases.get(kind)
            if lease is None:
                continue
            lease.ceiling = part.ceiling
            lease.left = part.left + lease.unseen
            lease.elsewhere = part.elsewhere
            lease.wait_until_ns = now_ns + part.wait_ms * _MS if part.wait_ms else 0
            lease.reset_ns = now_ns + part.reset_ms * _MS
            for slot in [slot for slot, at in lease.changed.items() if at < state.sequence]:
                del lease.changed[slot]


def _valid_until_ns(sent_ns: int, silent_ms: int) -> int:
    """Return the time at which a lease ends here, which is earlier than at the bank."""
    return sent_ns + silent_ms * _MS * 3 // 4
