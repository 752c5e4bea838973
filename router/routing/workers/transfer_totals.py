"""Totals of hand-offs in `/fleet`, over all incarnations and over router restarts."""

from pathlib import Path
from time import monotonic_ns

import msgspec

from baton.registry.json_file import keep, kept

_SAVE_EVERY_NS = 1_000_000_000
_REMEMBERED_LIVES = 4096

Totals = tuple[int, int, int]  # count, bytes, failures


class _Book(msgspec.Struct):
    lives: dict[str, Totals] = {}
    past: Totals = (0, 0, 0)


class TransferLedger:
    """Totals that never fall.

    Args:
        file: File that keeps them beyond this process; None for memory only.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._book = kept(file, _Book) or _Book()
        self._saved_ns = 0

    def note(self, incarnation: bytes, totals: Totals) -> None:
        """Note the totals that an incarnation reports."""
        lives = self._book.lives
        key = incarnation.hex()
        before = lives.get(key, (0, 0, 0))
        now = (max(before[0], totals[0]), max(before[1], totals[1]), max(before[2], totals[2]))
        if now == before:
            return
        lives[key] = now
        if len(lives) > _REMEMBERED_LIVES:
            self._book.past = _add(self._book.past, lives.pop(next(iter(lives))))
        if monotonic_ns() - self._saved_ns > _SAVE_EVERY_NS:
            self.save()

    def total(self) -> Totals:
        """Return the sum over all incarnations."""
        total = self._book.past
        for part in self._book.lives.values():
            total = _add(total, part)
        return total

    def save(self) -> None:
        """Write the totals to the file."""
        self._saved_ns = monotonic_ns()
        keep(self._file, self._book)


def _add(a: Totals, b: Totals) -> Totals:
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2])
