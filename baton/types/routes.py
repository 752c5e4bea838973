"""Table that leads the names which clients send to the models that answer.

A name is an alias of one model, its target. While a new version is tried, a canary gets a share of
the conversations, or the requests of some tenants. A shadow gets copies of requests, and answers no
client. A name without an entry leads to the model of that name.
"""

from collections.abc import Mapping

import msgspec

from baton.types.gates import GoldenPrompt
from baton.types.versioned import Versioned


class NameRoute(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Models of one name.

    Attributes:
        target: Model that answers.
        canary: Model that answers in its place for a share of the requests; empty: none.
        share: Share of the conversations that the canary gets, from 0 to 1.
        tenants: Tenants whose requests all go to the canary.
        fallbacks: Models that answer while no worker of the target is ready, in this order, if the
            client allows it.
        previous: Target before the last promotion, to which a rollback leads; empty: none.
        since_ms: Start of the canary or the shadow in Unix milliseconds.
        thrown_out: Last canary, if the fleet itself has rolled it back; empty: it has not.
        reason: Reason of that, or of the end of the shadow.
        shadow: Model that runs copies of requests; empty: none.
        shadow_share: Share of the conversations whose requests are copied, from 0 to 1; 0: the gate
            has ended the shadow.
    """

    target: str
    canary: str = ""
    share: float = 0.0
    tenants: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    previous: str = ""
    since_ms: int = 0
    thrown_out: str = ""
    reason: str = ""
    shadow: str = ""
    shadow_share: float = 0.0

    @property
    def candidate(self) -> str:
        """Model that is tried: the canary, or the shadow; empty: none."""
        return self.canary or (self.shadow if self.shadow_share else "")


class RouteTable(Versioned, frozen=True):
    """Routes of all names, and golden prompts of models that operators have set."""

    names: Mapping[str, NameRoute] = {}
    golden: Mapping[str, tuple[GoldenPrompt, ...]] = {}
