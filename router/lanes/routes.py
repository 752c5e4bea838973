"""Which model answers a request, and changes of that. Pure: no I/O, no clock, no random numbers.

The same name, tenant and conversation always lead to the same model, as long as the table is the
same. A larger share of a canary moves conversations to it, and none away from it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

import msgspec

from baton.types.gates import GoldenPrompt
from baton.types.routes import NameRoute, RouteTable
from baton.types.versioned import TableChangeError

MAX_NAMES = 1024


@dataclass(frozen=True, slots=True)
class Route:
    """Model that answers a request.

    Attributes:
        why: Reason: ``named``, ``alias``, ``canary 5 %``, ``stable 95 %``, ``tenant``,
            ``rollback: …`` or ``fallback: …``.
        rollback_to: Model to which a rollback would lead; empty: none.
        requested: Name that the client sent.
        shadow: Model that runs a copy of the request; empty: none.
    """

    model: str
    why: str
    rollback_to: str
    requested: str
    shadow: str = ""


def route(
    table: RouteTable,
    name: str,
    tenant: str,
    conversation: Callable[[], str],
    ready: Callable[[str], bool],
    *,
    may_fall_back: bool = False,
) -> Route:
    """Return the model that answers a request.

    ``conversation``: returns a text that all requests of a conversation have in common. It is read
    only if the name has a canary or a shadow. ``ready``: whether a model has a worker that takes
    requests. ``may_fall_back``: whether the client accepts the answer of another model.
    """
    entry = table.names.get(name)
    if entry is None:
        return Route(name, "named", "", name)
    chosen = _chosen(entry, name, tenant, conversation)
    if chosen.model == entry.canary and not ready(entry.canary) and ready(entry.target):
        why = f"rollback: {entry.canary} has no ready worker"
        chosen = Route(entry.target, why, entry.previous, name)
    if may_fall_back and not ready(chosen.model):
        other = next((model for model in entry.fallbacks if ready(model)), None)
        if other is not None:
            why = f"fallback: {chosen.model} has no ready worker"
            return Route(other, why, chosen.model, name)
    if entry.shadow_share and position(name, tenant, conversation()) < entry.shadow_share:
        return replace(chosen, shadow=entry.shadow)
    return chosen


def _chosen(entry: NameRoute, name: str, tenant: str, conversation: Callable[[], str]) -> Route:
    if entry.canary and tenant in entry.tenants:
        return Route(entry.canary, "tenant", entry.target, name)
    if entry.canary and entry.share:
        if position(name, tenant, conversation()) < entry.share:
            return Route(entry.canary, f"canary {entry.share * 100:g} %", entry.target, name)
        why = f"stable {(1 - entry.share) * 100:g} %"
        return Route(entry.target, why, entry.previous, name)
    if entry.thrown_out:
        return Route(entry.target, f"rollback: {entry.reason}", entry.previous, name)
    why = "named" if entry.target == name else "alias"
    return Route(entry.target, why, entry.previous, name)


def position(name: str, tenant: str, conversation: str) -> float:
    """Return the place of a conversation among all of a name, from 0 to 1, evenly distributed."""
    text = "\0".join((name, tenant, conversation))
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def with_alias(table: RouteTable, name: str, target: str) -> RouteTable:
    """Return the table in which a name leads to a model; the previous target is remembered."""
    entry = table.names.get(name, NameRoute(target=""))
    _refuse_canary(name, entry)
    previous = entry.target if entry.target != target else entry.previous
    made = NameRoute(target=target, fallbacks=entry.fallbacks, previous=previous)
    return with_entry(table, name, made)


def with_fallbacks(table: RouteTable, name: str, fallbacks: tuple[str, ...]) -> RouteTable:
    """Return the table with the fallbacks of a name; a name without an entry is its own target."""
    entry = table.names.get(name) or NameRoute(target=name)
    return with_entry(table, name, msgspec.structs.replace(entry, fallbacks=fallbacks))


def with_canary(
    table: RouteTable,
    name: str,
    canary: str,
    share: float | None = None,
    tenants: tuple[str, ...] | None = None,
    *,
    now_ms: int = 0,
) -> RouteTable:
    """Return the table in which a canary gets a share of a name's conversations, or tenants.

    What is not given stays as it was for the same canary. ``now_ms`` is the start of a new one in
    Unix milliseconds.

    Raises:
        TableChangeError: Share and tenants are missing, or the canary is the target.
    """
    entry = table.names.get(name) or NameRoute(target=name)
    if entry.canary != canary:
        _refuse_canary(name, entry)
    if canary == entry.target:
        raise TableChangeError(f"{canary} already answers all requests for {name}")
    if share is not None and not 0 <= share <= 1:
        raise TableChangeError(f"a share must be from 0 to 100 % (got {share * 100:g} %)")
    share = entry.share if share is None else share
    tenants = entry.tenants if tenants is None else tenants
    if not share and not tenants:
        raise TableChangeError("a canary needs a share or tenants")
    since_ms = entry.since_ms if entry.canary else now_ms
    made = _plain(entry, canary=canary, share=share, tenants=tenants, since_ms=since_ms)
    return with_entry(table, name, made)


def with_shadow(
    table: RouteTable, name: str, shadow: str, share: float | None, *, now_ms: int = 0
) -> RouteTable:
    """Return the table in which a shadow gets copies of a share of a name's conversations.

    ``now_ms`` is the start of a new one in Unix milliseconds.

    Raises:
        TableChangeError: There is no share, the name has a canary, or the shadow is its target.
    """
    entry = table.names.get(name) or NameRoute(target=name)
    _refuse_canary(name, entry)
    if shadow == entry.target:
        raise TableChangeError(f"{shadow} already answers all requests for {name}")
    if not share or not 0 < share <= 1:
        raise TableChangeError(
            f"a shadow needs a share above 0 and up to 100 % (got {(share or 0) * 100:g} %)"
        )
    since_ms = entry.since_ms if entry.candidate == shadow else now_ms
    made = _plain(entry, shadow=shadow, shadow_share=share, since_ms=since_ms)
    return with_entry(table, name, made)


def promoted(table: RouteTable, name: str) -> RouteTable:
    """Return the table in which a name's canary answers all its requests.

    Raises:
        TableChangeError: The name has no canary.
    """
    entry = table.names.get(name)
    if entry is None or not entry.canary:
        raise TableChangeError(f"{name} has no canary to promote")
    done = NameRoute(target=entry.canary, fallbacks=entry.fallbacks, previous=entry.target)
    return with_entry(table, name, done)


def rolled_back(table: RouteTable, name: str) -> RouteTable:
    """Return the table without a name's canary or shadow, or else with the target before.

    Raises:
        TableChangeError: The name has neither.
    """
    entry = table.names.get(name)
    if entry is None or not (entry.candidate or entry.previous):
        raise TableChangeError(f"{name} has nothing to roll back")
    if entry.candidate:
        return with_entry(table, name, _plain(entry))
    before = NameRoute(target=entry.previous, fallbacks=entry.fallbacks)
    return with_entry(table, name, before)


def thrown_out(table: RouteTable, name: str, tried: NameRoute, reason: str) -> RouteTable:
    """Return the table without the canary or shadow of the entry ``tried``, for a reason.

    Raises:
        TableChangeError: It is not the canary or shadow any more.
    """
    entry = table.names.get(name)
    if entry is None or (entry.candidate, entry.since_ms) != (tried.candidate, tried.since_ms):
        kind = "canary" if tried.canary else "shadow"
        raise TableChangeError(f"{tried.candidate} is no longer the {kind} of {name}")
    if entry.shadow_share:
        ended = msgspec.structs.replace(entry, shadow_share=0.0, reason=reason)
        return with_entry(table, name, ended)
    return with_entry(table, name, _plain(entry, thrown_out=entry.canary, reason=reason))


def _plain(entry: NameRoute, **changes: Any) -> NameRoute:
    """Return an entry without its canary or shadow, and with these fields."""
    plain = NameRoute(target=entry.target, fallbacks=entry.fallbacks, previous=entry.previous)
    return msgspec.structs.replace(plain, **changes)


def _refuse_canary(name: str, entry: NameRoute) -> None:
    if entry.canary:
        raise TableChangeError(
            f"{name} has the canary {entry.canary}: use `baton models promote` or `rollback` first"
        )


def with_golden(table: RouteTable, model: str, prompts: tuple[GoldenPrompt, ...]) -> RouteTable:
    """Return the table with other golden prompts of a model; none: those of the fleet file."""
    golden = {name: kept for name, kept in table.golden.items() if name != model}
    if prompts:
        golden[model] = prompts
    return msgspec.structs.replace(table, golden=golden)


def without(table: RouteTable, name: str) -> RouteTable:
    """Return the table without an entry.

    Raises:
        TableChangeError: There is none.
    """
    if name not in table.names:
        raise TableChangeError(f"{name} is not an alias")
    names = {key: entry for key, entry in table.names.items() if key != name}
    return msgspec.structs.replace(table, names=names)


def route_entry(entry: NameRoute | None) -> dict[str, Any] | None:
    """Return a route as JSON, for operators and the audit log."""
    return None if entry is None else msgspec.structs.asdict(entry)


def models_of(entry: NameRoute) -> frozenset[str]:
    """Return all models that an entry names."""
    return frozenset({entry.target, entry.candidate, entry.previous, *entry.fallbacks} - {""})


def leads_to(entry: NameRoute) -> frozenset[str]:
    """Return the models that run requests of a name now: its target, and its canary or shadow."""
    return frozenset({entry.target, entry.candidate} - {""})


def with_entry(table: RouteTable, name: str, entry: NameRoute) -> RouteTable:
    """Return the table with an entry of a name, unless it leads to the model of this name only.

    Raises:
        TableChangeError: The table has too many names.
    """
    plain = NameRoute(target=name)
    names = {key: entry for key, entry in table.names.items() if key != name}
    if entry != plain:
        names[name] = entry
    if len(names) > MAX_NAMES:
        raise TableChangeError(f"more than {MAX_NAMES} names would have routes")
    return msgspec.structs.replace(table, names=names)
