"""Exchanges between routers and the bank of one tenant's limits, from which they lease parts.

    limit ≥ used in the window, by all routers + leased and not yet spent

Amounts that routers report are totals, so a lost, late or repeated exchange changes nothing:
``spent_total`` counts all that a router ever took from its leases, ``ceiling`` is the value that it
may reach. Use counts in slots of time; a refund lowers the slot of the request that caused it.
The bank is a script in Redis, see ``quotas.py``; ``tests/tenants/bank.py`` computes the same.
"""

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


class LimitPart(msgspec.Struct, kw_only=True):
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
    parts: dict[str, LimitPart] = {}
