"""Hints of clients about a call: how long its KV stays, and its turn among the tenant's calls.

They change the order of evictions, and that of one tenant's requests, and nothing else.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from router.sessions.identity import FLOWS, HEADERS, is_id

FINAL_HEADER = "x-dynamo-session-final"
RETENTION = r"^(in[-_]memory|[0-9]{1,5}[smh])$"
"""Pattern of ``prompt_cache_retention``."""

_TURNS = {"priority": -1, "flex": 1}
HEADER_HINTS: Mapping[str, tuple[str, ...] | None] = {
    **dict.fromkeys((*HEADERS, *FLOWS)),
    FINAL_HEADER: ("true", "false"),
    "x-dynamo-parent-session-id": (),
}
"""Headers of hints, as ``HINTS``."""
HINTS: Mapping[str, tuple[object, ...] | None] = {
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "prompt_cache_options": (),
    "cache_control": None,
    "service_tier": ("auto", "default", "standard_only", *_TURNS),
    "speed": ("standard",),
    "osl": None,
    "priority": None,
    "strict_priority": (0,),
    "latency_sensitivity": (0,),
    "speculative_prefill": (False,),
}
"""Hints in bodies, the last five in Dynamo's ``nvext.agent_hints``, and values that are honoured or
ask for nothing; None: all that are not refused. Others are named in ``x-baton-ignored``."""
_UNIT_S = {"s": 1, "m": 60, "h": 3600}
_MOST_KEEP_S = 24 * 3600
_KEPT = re.compile(r"([0-9]+)([smh])")


class Hints(NamedTuple):
    """Hints of one call.

    Attributes:
        keep_s: Time that its KV stays cached before other KV; 0: its session has ended; None: as
            any other.
        turn: Requests of a tenant with lower values go first; 0 is usual.
        kept: Whether the lane can pin KV: other engines than Baton's offer no way to.
    """

    keep_s: int | None = None
    turn: int = 0
    kept: bool = True

    def explain(self) -> dict[str, int | None]:
        """Return the hints that were given, for the request report."""
        shown = {"keep_s": self.keep_s, "turn": self.turn or None, "kept": self.kept and None}
        return {name: value for name, value in shown.items() if value is not None}


NO_HINTS = Hints()


def is_in_vain(name: str, value: object) -> bool:
    """Return whether a value is one of a hint that has no effect."""
    heeded = HINTS.get(name)
    return heeded is not None and value is not None and value not in heeded


def unread_hints(headers: Mapping[str, str]) -> list[str]:
    """Return the headers of hints that have no effect, such as an id with a space."""
    return [
        name
        for name, heeded in HEADER_HINTS.items()
        if (value := headers.get(name, ""))
        and (not is_id(value) if heeded is None else value.lower() not in heeded)
    ]


def hints_of(
    retention: str | None, service_tier: str | None, priority: int | None = None, *, final: bool
) -> Hints:
    """Return the hints of a call: `prompt_cache_retention`, `service_tier`, the final header.

    ``priority`` is that of Dynamo's agent hints, of which higher ones go first.
    """
    turn = _TURNS.get(service_tier or "", -(priority or 0))
    if final:
        return Hints(0, turn)
    given = _KEPT.fullmatch(retention or "")
    if given is None:
        return Hints(None, turn) if turn else NO_HINTS
    return Hints(min(int(given[1]) * _UNIT_S[given[2]], _MOST_KEEP_S), turn)
