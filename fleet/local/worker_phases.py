"""Phases of the workers, as the supervisor waits for them and shows them."""

from collections.abc import Callable, Sequence
from typing import Any

from baton.config.fleet_file import FleetConfig

_GIVE_UP_LIVES = 3  # failed starts of a worker after which the fleet's start fails
_IN_PLACE = ("ready", "parked", "absent", "unfit")  # the last two are of attached servers
_NAMED = 3  # late workers that a line names
_DESCRIBED = 8  # at most, workers that start, of which each step is shown


class ShownWorkers:
    """Shows each worker whose phase has changed, and counts its failed starts."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lines: dict[str, str] = {}  # last line of each worker
        self._first: dict[str, int] = {}  # first epoch of each worker that was seen

    def show(self, slots: Sequence[dict[str, Any]]) -> None:
        """Show what is new in the slots."""
        are_few = sum(map(_is_late, slots)) <= _DESCRIBED
        for slot in slots:
            name = slot["worker_id"]
            reason = slot["reason"]
            life = f", epoch {slot['epoch']}" if slot["epoch"] > 1 else ""
            line = f"{name} {slot['phase']}{life}" + (f" ({reason})" if reason else "")
            if are_few and (doing := _doing(slot)):
                line += f": {doing}"
            if self._lines.get(name) != line:
                self._lines[name] = line
                self._say(line)

    def failed_start(self, slots: Sequence[dict[str, Any]]) -> tuple[str, str] | None:
        """Return the id and the problem of a worker that failed to start too often, if any."""
        for slot in slots:
            name = slot["worker_id"]
            lives = slot["epoch"] - self._first.setdefault(name, max(slot["epoch"], 1)) + 1
            if lives >= _GIVE_UP_LIVES and slot["reason"] and slot["phase"] == "waiting":
                return name, f"{name} failed {lives} times: {slot['reason']}"
        return None


def all_in_place(slots: Sequence[dict[str, Any]], config: FleetConfig) -> bool:
    """Return whether no worker is late; parked ones were drained by an operator."""
    bounds = [lane.pools.bounds for lane in config.lanes]
    may_be_empty = all(bound is not None and bound.min == 0 for bound in bounds)
    return bool(slots or may_be_empty) and not any(_is_late(slot) for slot in slots)


def late_workers(slots: Sequence[dict[str, Any]]) -> str:
    """Return the names of workers that are not ready yet, or ""."""
    late = [
        slot["worker_id"] + (f" ({doing})" if (doing := _doing(slot)) else "")
        for slot in slots
        if _is_late(slot)
    ]
    more = f" and {len(late) - _NAMED} more workers" if len(late) > _NAMED else ""
    return ", ".join(late[:_NAMED]) + more


def _doing(slot: dict[str, Any]) -> str:
    """Return what a worker does while it starts; "" if that is unknown."""
    return str(slot.get("doing", "")) if slot["phase"] == "starting" else ""


def _is_late(slot: dict[str, Any]) -> bool:
    """Return whether a worker is not ready, or has yet to be restarted by a rolling restart."""
    return slot["phase"] not in _IN_PLACE or slot.get("renewed_later", False)
