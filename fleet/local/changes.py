"""Plan for applying a changed fleet file to a running fleet, computed from two configurations.

New pool sizes add and remove workers. New worker settings restart the workers one by one. New
router settings replace the router. A file that changes a fixed key is rejected as a whole.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from baton.config.fleet_file import FleetConfig
from baton.registry.types import Role
from fleet.pools.resources import (
    ControllerSpec,
    bundles,
    settings_digest,
    worker_environment,
    worker_settings,
)
from fleet.pools.slots import Launch

# Keys that need a stop and a start, and the reason.
_FIXED = {
    "fleet": "another name means another fleet",
    "host": "the router listens there",
    "port": "the router listens there",
    "redis": "routers on other hosts would not follow",
} | dict.fromkeys(
    ("model", "dtype", "numerics", "quantisation"),
    "responses that migrate between workers would change",
)
_FIXED_PARTS = {
    "pools.engine": _FIXED["model"],
    "pools.tls": "old and new workers could not connect",
    "pools.insecure": "old and new workers could not connect",
    "pools.token_file": "routers and workers would have different tokens; write the new token into "
    "the present file",
    "clients.tls": "clients know the URL",
    "pools.routers": "their sockets are open",
    "logs.dir": "its files are open",
}
_NO_SPEC = ControllerSpec(config_json="", redis_url="", fleet_token="", host="", log_dir="")
_ROLES: tuple[Role, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes to a running fleet.

    Attributes:
        keys: Keys of the file that differ.
        turned: Workers that change their role, as text, such as ``2 decode workers``.
        added: Workers to start.
        removed: Workers to drain and stop.
        renewed: Workers to restart, one after another.
        router: Whether the router is replaced.
        refused: Reasons for rejecting the file; empty if it can be applied.
        models_ended: Models whose workers end once no router serves them.
    """

    keys: tuple[str, ...] = ()
    turned: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    renewed: tuple[str, ...] = ()
    router: bool = False
    refused: tuple[str, ...] = ()
    models_ended: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """Return the plan as text, one line per step."""
        if self.refused:
            return list(self.refused)
        if not self.keys:
            return ["nothing has changed"]
        lines = [f"changed: {', '.join(self.keys)}"]
        parts = {
            "change the role of": self.turned,
            "start": self.added,
            "drain and stop": self.removed,
            "restart one by one": self.renewed,
        }
        lines += [f"{verb}: {', '.join(names)}" for verb, names in parts.items() if names]
        if self.router:
            lines.append("replace the router; the old one finishes its responses")
        if len(lines) == 1:
            lines.append("no process is affected")
        return lines


def changes(old: FleetConfig, new: FleetConfig, *, same_keys: bool | None = None) -> Changes:
    """Return the changes from one configuration to another.

    ``same_keys`` is whether the API keys are equal, if ``old`` lacks them.
    """
    if old.models or new.models:
        return _lane_changes(old, new, same_keys=same_keys)
    return _changes(old, new, same_keys=same_keys)


def _lane_changes(old: FleetConfig, new: FleetConfig, *, same_keys: bool | None) -> Changes:
    """Return the changes of all lanes together, with the models that come and go."""
    if not (old.models and new.models):
        why = "cannot change while the fleet runs: workers have other names (stop and start it)"
        return Changes(keys=("models",), refused=(f"model, models: {why}",))
    begun = [name for name in new.models if name not in old.models]
    ended = [name for name in old.models if name not in new.models]
    kept = [name for name in new.models if name in old.models]
    by_lane = {name: _changes(old.lane(name), new.lane(name), same_keys=same_keys) for name in kept}
    for name in begun:
        by_lane[name] = Changes(added=_counted(new.lane(name).pools.start_sizes))
    for name in ended:
        by_lane[name] = Changes(removed=_counted(old.lane(name).pools.start_sizes))
    of_fleet = _changes(old, new, same_keys=same_keys)
    parts = {
        part: tuple(
            f"{name}: {text}" for name, change in by_lane.items() for text in getattr(change, part)
        )
        for part in ("turned", "added", "removed", "renewed")
    }
    keys = ["models"] * bool(begun or ended)
    gates = [name for name in kept if old.models[name].gates != new.models[name].gates]
    keys += ["gates"] * bool(gates)
    keys += [key for change in (of_fleet, *by_lane.values()) for key in change.keys]
    return Changes(
        keys=tuple(dict.fromkeys(keys)),
        refused=tuple(
            dict.fromkeys(
                line for change in (of_fleet, *by_lane.values()) for line in change.refused
            )
        ),
        router=bool(begun or ended or gates) or any(change.router for change in by_lane.values()),
        models_ended=tuple(ended),
        **parts,
    )


def _changes(old: FleetConfig, new: FleetConfig, *, same_keys: bool | None) -> Changes:
    names = [name for name in type(new).model_fields if getattr(old, name) != getattr(new, name)]
    if same_keys is not None:
        names = [name for name in names if name != "api_keys"] + ["api_keys"] * (not same_keys)
    refused = [
        f"{name} cannot change while the fleet runs: {_FIXED[name]}"
        for name in names
        if name in _FIXED
    ]
    refused += [
        f"{name} cannot change while the fleet runs: {why}"
        for name, why in _FIXED_PARTS.items()
        if attrgetter(name)(old) != attrgetter(name)(new)
    ]
    if refused:
        why = " (stop and start the fleet, or start a second one)"
        return Changes(keys=tuple(names), refused=(*refused[:-1], refused[-1] + why))
    more = {role: getattr(new.pools, role) - getattr(old.pools, role) for role in _ROLES}
    turns = 0
    opposite = min(more.values()) < 0 < max(more.values())
    if opposite and not new.pools.roles_differ:
        turns = min(map(abs, more.values()))
    stay = {role: min(getattr(old.pools, role), getattr(new.pools, role)) for role in _ROLES}
    renewed = [role for role in _ROLES if stay[role] and _started(old, role) != _started(new, role)]
    return Changes(
        keys=tuple(names),
        turned=_counted({role: turns for role in _ROLES if more[role] < 0}),
        added=_counted({role: more[role] - turns for role in _ROLES if more[role] > 0}),
        removed=_counted({role: -more[role] - turns for role in _ROLES if more[role] < 0}),
        renewed=_counted({role: stay[role] for role in renewed}),
        router=_router_reads(old) != _router_reads(new) or "api_keys" in names,
    )


def keys_digest(config: FleetConfig, salt: str) -> str:
    """Return a digest of the API keys, which detects a change without storing them.

    The salt is secret and constant during a run of the fleet, unlike its token.
    """
    keys = {key: rule.model_dump(mode="json") for key, rule in (config.api_keys or {}).items()}
    raw = json.dumps(keys, sort_keys=True).encode()
    return hashlib.blake2b(raw, key=salt.encode()[:64], digest_size=16).hexdigest()


def _counted(workers: Mapping[Role, int] | Mapping[str, int]) -> tuple[str, ...]:
    return tuple(
        f"{count} {role} worker{'s' if count > 1 else ''}"
        for role, count in workers.items()
        if count
    )


def _started(config: FleetConfig, role: Role) -> str:
    """Return a digest of everything that a worker of a role is started with."""
    settings = worker_settings(config, Launch("", role, 0), _NO_SPEC)
    return f"{settings_digest(settings)} {bundles(config, role)} {worker_environment(config)}"


def _router_reads(config: FleetConfig) -> object:
    from router.settings import LaneSettings, ProcessSettings

    return ProcessSettings.of(config), LaneSettings.of(config)
