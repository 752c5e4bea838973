"""Load of each router of a fleet, shared a few times a second, and its prompts, at once."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from baton.registry.redis_store import Registry
from baton.registry.types import WorkDemand

_TTL_MS = 60_000
_PLAN_TTL_MS = 10_000
Sleep = Literal["", "wait", "abort"]
_PROMPTS = 128  # entries of up to 256 KiB; those that are not read at once are of no use


class TenantDemand(msgspec.Struct, frozen=True, array_like=True):
    """Load of one tenant at one router: running and waiting sequences, tokens served so far."""

    running: int = 0
    waiting: int = 0
    served_tokens: float = 0.0


class RouterDemand(msgspec.Struct, frozen=True, kw_only=True):
    """Load of one router: ``queued`` requests wait there; ``beat`` counts its reports.

    It places by all workers' turns up to number ``turn``. ``work`` is for the planner of roles;
    routers ignore each other's.
    """

    beat: int
    queued: int = 0
    turn: int = 0
    tenants: dict[str, TenantDemand] = {}
    work: WorkDemand = WorkDemand()


class PlannedSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the pools by the planner, whether it may act or not.

    ``load`` is that of the fuller role at the best split of the ready workers; from 1 on, no split
    of them holds the load. 0: there is no load to judge. ``asleep`` is not empty from the unloading
    of the model to its loading: ``wait`` lets requests end, ``abort`` ends them.
    """

    prefill: int = 0
    decode: int = 0
    load: float = 0.0
    asleep: Sleep = ""


class RouterDemands:
    """Loads of all routers, in one hash, their prompts, and the planner's last result.

    Every call may raise the registry's ``RegistryUnavailableError``.

    Attributes:
        plan: Result of the planner at the last exchange; zeros if there is none.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.plan = PlannedSizes()

    async def exchange(self, router_id: str, own: RouterDemand) -> dict[str, RouterDemand]:
        """Report the load of one router and return the loads of all others."""
        key = self._registry.key("routers")
        _, raws, _, plan = await self._registry.send(
            ("HSET", key, router_id, msgspec.msgpack.encode(own)),
            ("HGETALL", key),
            ("PEXPIRE", key, _TTL_MS),
            ("GET", self._registry.key("plan")),
        )
        self.plan = self._registry.decoded("plan", plan, PlannedSizes) or PlannedSizes()
        return self._readable(raws, router_id)

    async def report_plan(self, plan: PlannedSizes) -> None:
        """Report the result of the planner; it is valid for ten seconds."""
        raw = msgspec.msgpack.encode(plan)
        await self._registry.send(("SET", self._registry.key("plan"), raw, "PX", _PLAN_TTL_MS))

    async def read(self) -> dict[str, RouterDemand]:
        """Return the loads of all routers, also of some that are gone."""
        (raws,) = await self._registry.send(("HGETALL", self._registry.key("routers")))
        return self._readable(raws, "")

    def _readable(self, raws: Mapping[bytes, bytes], own_id: str) -> dict[str, RouterDemand]:
        read = {
            router_id: self._registry.decoded(f"router {router_id}", raws[name], RouterDemand)
            for router_id, name in self._registry.names_in(raws).items()
            if router_id != own_id
        }
        return {router_id: demand for router_id, demand in read.items() if demand is not None}

    async def forget(self, *router_ids: str) -> None:
        """Remove routers that are gone."""
        await self._registry.send(("HDEL", self._registry.key("routers"), *router_ids))

    async def add_prompts(self, entries: Sequence[bytes]) -> None:
        """Add entries to the stream of prompts, which all routers read in one order."""
        key = self._registry.key("prompts")
        adds = [("XADD", key, "MAXLEN", "~", _PROMPTS, "*", "p", entry) for entry in entries]
        await self._registry.send(*adds, ("PEXPIRE", key, _TTL_MS))

    async def read_prompts(self, after: bytes, wait_s: float) -> tuple[bytes, list[bytes]]:
        """Return new entries and the position after them; an empty one is the present end."""
        key = self._registry.key("prompts")
        if not after:
            (newest,) = await self._registry.send(("XREVRANGE", key, "+", "-", "COUNT", 1))
            after = bytes(newest[0][0]) if newest else b"0-0"
        wait = ("BLOCK", int(wait_s * 1000), "COUNT", 16)
        (answer,) = await self._registry.send(("XREAD", *wait, "STREAMS", key, after))
        entries = answer[0][1] if answer else []
        return bytes(entries[-1][0]) if entries else after, [e.get(b"p", b"") for _, e in entries]
