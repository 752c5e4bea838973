"""Slot of a worker in a router: its record, its link, and whether it takes requests."""

from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from batonpb.common_pb2 import Capabilities, WorkerStatus

from baton.registry.types import Role, WorkerRecord
from baton.wire.compatibility import emulation, external_engine, wire_overlaps
from router.routing.workers.link import WorkerLink

_STATES = ("starting", "ready", "draining")
_COUNTS = ("total", "free", "cached", "leased", "quarantined")


class WorkerSlot:
    """Place of a worker in a pool, over all its incarnations.

    Args:
        emulated: Timing model that its engine must have; "" for a real engine.
    """

    def __init__(self, record: WorkerRecord, emulated: str = "") -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._record = record
        self._emulated = emulated
        self._link: WorkerLink | None = None
        self._checked: tuple[Capabilities | None, bool] = (None, False)
        self.dead_since_ns: int | None = None
        self.draining_since_ns = 0  # as of its last report; 0: it is not draining
        self.epoch = record.epoch
        self.listed = True  # in the directory
        self.older: WorkerRecord | None = None  # the directory's record, if of an earlier epoch

    @property
    def record(self) -> WorkerRecord:
        """Last record in the directory."""
        return self._record

    @record.setter
    def record(self, record: WorkerRecord) -> None:
        self._record = record
        self.on_change()

    @property
    def link(self) -> WorkerLink | None:
        """Stream to the worker, if there is one."""
        return self._link

    @link.setter
    def link(self, link: WorkerLink | None) -> None:
        if self._link is not None:
            self._link.on_change = lambda: None
        self._link = link
        if link is not None:
            link.on_change = lambda: self.on_change()  # which may be set later
        self.on_change()

    @property
    def worker_id(self) -> str:
        """Id of the worker, such as ``worker-1``."""
        return self._record.worker_id

    @property
    def role(self) -> Role:
        """Role of the worker: ``prefill`` or ``decode``."""
        return self._record.role

    @property
    def state(self) -> str:
        """State of the worker: starting, ready, draining, dead, or parked by an operator."""
        link = self.link
        if link is not None and link.known and link.status is not None:
            if self.record.state == "draining":
                return "draining"
            return link.status.state if link.status.state in _STATES else "ready"
        if self.dead_since_ns is not None or self.record.state == "dead":
            return "parked" if self.listed and self.record.intent == "park" else "dead"
        return "starting"

    @property
    def is_wanted(self) -> bool:
        """True if it should be ready, now or after a restart."""
        return self.listed and self.record.intent == "serve"

    @property
    def is_kept(self) -> bool:
        """True if it stays in the list without a process, since its slot was not removed."""
        return self.listed and self.record.intent != "leave"

    @property
    def is_begun(self) -> bool:
        """True while the controller starts another incarnation."""
        return self.listed and self.record.state == "starting"

    @property
    def reason(self) -> str:
        """Reason why the worker is not ready, and whether the controller starts it again."""
        state = self.state
        reason = "" if state == "ready" else self.record.reason
        if state == "dead" and self.is_begun:
            return f"{reason}; restarting" if reason else "restarting"
        return reason

    @property
    def incarnation(self) -> bytes:
        """Incarnation that is or was last connected; empty before the first."""
        return self.link.incarnation if self.link is not None else b""

    @property
    def refusal(self) -> str:
        """Reason why the worker is in the wrong fleet or not trusted, or ""."""
        link = self.link
        if link is not None and link.distrust:
            return link.distrust
        if link is None or not link.capabilities.numerics_id:
            return ""
        timings = [emulation(link.capabilities), self._emulated]
        if timings[0] == timings[1]:
            return ""
        kinds = [f"emulated ({timing})" if timing else "real" for timing in timings]
        return f"its engine is {kinds[0]}, the engines of this fleet are {kinds[1]}: not used"

    @property
    def usable(self) -> bool:
        """True if new requests may be placed here."""
        link = self._link
        if link is None or not link.live or self._record.intent != "serve":
            return False  # one that is about to drain would lose them
        return self.state == "ready" and self._fits(link)

    def _fits(self, link: WorkerLink) -> bool:
        capabilities = link.capabilities
        if link.distrust:
            return False
        if self._checked[0] is not capabilities:
            complete = wire_overlaps(capabilities.wire) and len(capabilities.kv_groups) > 0
            self._checked = capabilities, complete and not self.refusal
        return self._checked[1]

    @property
    def gives_prefixes(self) -> bool:
        """True if other workers may pull prefixes from it; a draining worker allows it, too."""
        link = self.link
        return link is not None and link.live and self.state in ("ready", "draining")

    def describe(self) -> dict[str, Any]:
        """Return the worker's entry in ``GET /fleet``: every field in every state."""
        link = self.link
        state = self.state
        has_process = state not in ("dead", "parked")
        alive = has_process and link is not None and link.status is not None
        status = link.status if alive and link is not None and link.status else WorkerStatus()
        identity = status.identity
        record = self.record
        incarnation = identity.incarnation or (link.incarnation if link else b"")
        ranks = list(record.ranks) or [identity.pid or record.pid] if has_process else []
        host = identity.host or record.host
        return {
            "id": record.worker_id,
            "role": record.role,
            "state": state,
            "reason": self.reason,
            "engine": self._engine(),
            "version": record.version,
            "refused": self.refusal,
            "incarnation": (incarnation or record.incarnation).hex(),
            "epoch": self.epoch,
            "ranks": ranks,
            "pid": identity.pid or record.pid if has_process else 0,
            "host": host,
            "address": identity.address or record.address,
            "kv_blocks": {name: getattr(status.kv_blocks, name) for name in _COUNTS},
            "kv_tiers": {
                tier.name: {"total": tier.blocks, "held": tier.held_blocks}
                for tier in status.kv_tiers
            },
            "running": status.running,
            "waiting": status.waiting,
            "threads": status.threads or record.threads if has_process else 0,
            "age_s": round((monotonic_ns() - link.status_ns) / 1e9, 3) if alive and link else None,
        }

    def _engine(self) -> str:
        if self.link is None or not self.link.capabilities.numerics_id:
            return ""
        if timing := emulation(self.link.capabilities):
            return f"emulated: {timing}"
        return external_engine(self.link.capabilities) or "real"
