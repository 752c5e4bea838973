"""Table that leads the names which clients send to the models that answer.

A name is an alias of one model, its target. While a new version is tried, a canary gets a share of
the conversations, or the requests of some tenants. A name without an entry leads to the model of
that name.
"""

from collections.abc import Mapping

import msgspec


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
    """

    target: str
    canary: str = ""
    share: float = 0.0
    tenants: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    previous: str = ""


class RouteTable(msgspec.Struct, frozen=True):
    """Routes of all names; ``version`` is the time of the change in ms, or 0 without one."""

    version: int = 0
    names: Mapping[str, NameRoute] = {}
