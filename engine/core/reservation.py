"""Decode's claim on pages for a prompt whose KV arrives from elsewhere.

    WANTED ──granted at its ticket──▶ RESERVED ──first publication──▶ BOUND ──commit──▶ (a sequence)
       ▲                                 │                              │
       └────────── revoked, new generation ────────────(pages drain)────┘

A generation is one claim; its number is never used again in this incarnation, so that a late
chunk of an old claim can be told from one of the new.
"""

import enum
from dataclasses import dataclass, field

from engine.core.sequence import EngineRequest


class ClaimState(enum.Enum):
    """Where a claim stands."""

    WANTED = "wanted"
    RESERVED = "reserved"
    BOUND = "bound"


@dataclass(slots=True, eq=False)
class Claim:
    """One REMOTE request's hold on the pool."""

    request: EngineRequest
    generation: int
    state: ClaimState = ClaimState.WANTED
    pinned: list[int] = field(default_factory=list)  # own cached prefix: will not travel
    need_blocks: int = 0  # counted, not yet taken (RESERVED)
    pages: list[int] = field(default_factory=list)  # taken for what arrives (BOUND)

    @property
    def order(self) -> tuple[int, int]:
        """The request's place in every order."""
        return self.request.order

    @property
    def blocks(self) -> list[int]:
        """The block table: pinned prefix, then pages."""
        return self.pinned + self.pages
