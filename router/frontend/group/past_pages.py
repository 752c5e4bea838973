"""Metrics of routers that have ended: each leaves its last page, which still counts.

A router writes its page whenever it is shown, and at its end. So totals that were shown once never
fall. Counts of a killed router after its last page are lost.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from baton.folders import replace_file
from router.frontend.group.pages import Pages

_ENDING = ".page"


class PastPages:
    """Last pages of a group's routers; this one sums up those of its position ``index``."""

    def __init__(self, folder: Path, index: int, together: Mapping[str, str]) -> None:
        self._folder = folder
        self._together = together
        self._index = index
        self._own = folder / f"{index}-{os.getpid()}{_ENDING}"

    def sum_up(self) -> None:
        """Merge the pages of this position's earlier processes into one."""
        past = self._folder / f"{self._index}-0{_ENDING}"
        ended = [file for file in self._files(self._index) if not _is_alive(file)]
        if [file for file in ended if file != past]:
            pages = Pages(self._together)
            for file in ended:
                pages.add(file.read_bytes(), past=True)
            _write(past, pages.render())
            for file in ended:
                if file != past:
                    file.unlink(missing_ok=True)

    def keep(self, page: bytes) -> None:
        """Save the page of this router."""
        _write(self._own, page)

    def missing(self, answered: set[int]) -> list[bytes]:
        """Return the pages of routers that have ended, or whose process id did not answer."""
        pages = []
        for file in self._files():
            if file != self._own and _pid(file) not in answered:
                with contextlib.suppress(FileNotFoundError):  # merged at this moment
                    pages.append(file.read_bytes())
        return pages

    def _files(self, index: int | None = None) -> list[Path]:
        position = "*" if index is None else index
        return sorted(self._folder.glob(f"{position}-*{_ENDING}"))


def _pid(file: Path) -> int:
    return int(file.stem.partition("-")[2])


def _is_alive(file: Path) -> bool:
    pid = _pid(file)
    return pid > 0 and Path(f"/proc/{pid}").exists()


def _write(file: Path, page: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk: totals may fall
        replace_file(file, page)
