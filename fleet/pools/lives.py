"""Table of the incarnations that a controller follows, by worker id. Does no I/O.

A slot has one incarnation, in an actor that is named after the first one that it hosted. An actor
of the fleet that the table does not have is a stranger, such as one whose end was lost with its
controller; it occupies its slot's placement and has to end.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleet.pools.liveness import Life


class LifeTable:
    """The followed incarnations, and in ``kept`` the actors for their slots' next ones."""

    def __init__(self) -> None:
        self._lives: dict[str, Life] = {}
        self.kept: dict[str, Life] = {}
        self._suspects: set[tuple[str, int]] = set()

    def __iter__(self) -> Iterator[str]:
        return iter(self._lives)

    def values(self) -> "list[Life]":
        """Return all followed incarnations."""
        return list(self._lives.values())

    def get(self, worker_id: str) -> "Life | None":
        """Return the incarnation of a slot."""
        return self._lives.get(worker_id)

    def of(self, worker_id: str, epoch: int) -> "Life | None":
        """Return a slot's incarnation if it has this epoch."""
        life = self._lives.get(worker_id)
        return life if life is not None and life.epoch == epoch else None

    def add(self, worker_id: str, life: "Life") -> "Life | None":
        """Follow an incarnation; return an earlier one of the slot, which has to end."""
        earlier = self._lives.get(worker_id)
        self._lives[worker_id] = life
        return earlier

    def remove(self, worker_id: str, life: "Life") -> None:
        """Stop following this incarnation; a later one of the slot stays."""
        if self._lives.get(worker_id) is life:
            del self._lives[worker_id]

    def strangers(self, listed: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Return the strangers among the fleet's actors (worker id, epoch in the name).

        Only those that the last call saw too: an actor that has just ended may still be listed.
        """
        known = {(w, life.named) for t in (self._lives, self.kept) for w, life in t.items()}
        suspects = set(listed) - known
        strangers = sorted(suspects & self._suspects)
        self._suspects = suspects
        return strangers
