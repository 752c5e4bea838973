"""What a changed fleet file means for a fleet that runs: a plan, made of two configurations.

Sizes add and remove workers; settings of workers renew them one by one; what only routers read
gives the fleet's router a successor. What cannot change while answers run is refused as a whole.
"""

import hashlib
import json
from dataclasses import dataclass

from baton.config.fleet_file import FleetConfig
from baton.registry.types import Role
from fleet.pools.resources import bundles, settings_digest, worker_environment, worker_settings

# Why each of them needs a stop and a start.
_FIXED = {
    "fleet": "another name is another fleet",
    "host": "the router's socket is open",
    "port": "the router's socket is open",
    "redis": "workers and routers elsewhere would not follow",
    "model": "answers that move between workers would change",
    "dtype": "answers that move between workers would change",
    "numerics": "answers that move between workers would change",
    "quantisation": "answers that move between workers would change",
}
_ROLES: tuple[Role, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Changes:
    """What has to be done to a fleet.

    Attributes:
        keys: Of the file, those that differ.
        added: Workers that begin.
        removed: Workers that are drained and end.
        renewed: Workers that begin a new life, one after another.
        router: Whether the router gets a successor.
        refused: Why the file cannot be taken; then nothing of it is.
    """

    keys: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    renewed: tuple[str, ...] = ()
    router: bool = False
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(self.lines)

    @property
    def lines(self) -> list[str]:
        """The plan, for people."""
        if self.refused:
            return list(self.refused)
        if not self.keys:
            return ["nothing has changed"]
        said = [f"changed: {', '.join(self.keys)}"]
        parts = {
            "starts": self.added,
            "drains and ends": self.removed,
            "renews, one after another": self.renewed,
        }
        said += [f"{verb}: {', '.join(names)}" for verb, names in parts.items() if names]
        if self.router:
            said.append("the router gets a successor; its answers end where they began")
        if len(said) == 1:
            said.append("no process has to change")
        return said


def changes(old: FleetConfig, new: FleetConfig, *, same_keys: bool | None = None) -> Changes:
    """What makes a fleet of ``old`` one of ``new``.

    Args:
        old: As it runs.
        new: As it shall be.
        same_keys: Whether the API keys are the same, where ``old`` does not have them.
    """
    names = [name for name in type(new).model_fields if getattr(old, name) != getattr(new, name)]
    if same_keys is not None:
        names = [name for name in names if name != "api_keys"] + ["api_keys"] * (not same_keys)
    refused = [
        f"{name} cannot change while it runs: {_FIXED[name]}" for name in names if name in _FIXED
    ]
    if old.pools.engine != new.pools.engine:
        refused.append(f"pools.engine cannot change while it runs: {_FIXED['model']}")
    if (old.pools.tls, old.pools.insecure) != (new.pools.tls, new.pools.insecure):
        refused.append("pools.tls cannot change while it runs: old and new would not speak")
    if old.pools.token_file != new.pools.token_file:
        refused.append(
            "pools.token_file cannot change while it runs: routers and workers would differ in "
            "their token; put the new token into the file that is named now"
        )
    if old.clients.tls != new.clients.tls:
        refused.append("clients.tls cannot change while it runs: clients know the URL")
    if old.pools.routers != new.pools.routers:
        refused.append("pools.routers cannot change while it runs: the routers' sockets are open")
    if old.logs.dir != new.logs.dir:
        refused.append("logs.dir cannot change while it runs: the files are open")
    if refused:
        why = " (a stop and a start does it, or a second fleet beside this one)"
        return Changes(keys=tuple(names), refused=(*refused[:-1], refused[-1] + why))
    before = _workers(old)
    after = _workers(new)
    return Changes(
        keys=tuple(names),
        added=tuple(name for name in after if name not in before),
        removed=tuple(name for name in before if name not in after),
        renewed=tuple(name for name in after if before.get(name, after[name]) != after[name]),
        router=_router_reads(old) != _router_reads(new) or "api_keys" in names,
    )


def keys_digest(config: FleetConfig, salt: str) -> str:
    """Tells a file's API keys from others, without being them.

    Args:
        config: Has the keys.
        salt: Of one run of a fleet; its token will not do, which may change while it runs.
    """
    keys = {key: rule.model_dump(mode="json") for key, rule in (config.api_keys or {}).items()}
    raw = json.dumps(keys, sort_keys=True).encode()
    return hashlib.blake2b(raw, key=salt.encode()[:64], digest_size=16).hexdigest()


def _workers(config: FleetConfig) -> dict[str, str]:
    """Worker id -> what it is started with, as a digest."""
    sizes: dict[Role, int] = {"prefill": config.pools.prefill, "decode": config.pools.decode}
    found: dict[str, str] = {}
    for role in _ROLES:
        settings = worker_settings(
            config,
            worker_id="",
            role=role,
            epoch=0,
            redis_url="",
            fleet_token="",
            host="",
            log_dir="",
        )
        started = (
            f"{settings_digest(settings)} {bundles(config, role)} {worker_environment(config)}"
        )
        found |= {f"{role}-{index}": started for index in range(sizes[role])}
    return found


def _router_reads(config: FleetConfig) -> object:
    from router.settings import RouterSettings

    return RouterSettings.from_config(config.model_copy(update={"api_keys": None}))
