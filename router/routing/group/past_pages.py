"""The metrics of routers that are no more: each life leaves its last page, which counts on.

A life's page is written whenever it is shown, and at its end. So what was shown once is never taken
back; what a router that is killed counted after it was last asked is lost.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from router.routing.group.pages import Pages

_ENDING = ".page"


class PastPages:
    """The pages of a group's routers.

    Args:
        folder: Of the group.
        index: The place of this router, whose earlier lives it sums up.
        together: As of `Pages`.
    """

    def __init__(self, folder: Path, index: int, together: Mapping[str, str]) -> None:
        self._folder = folder
        self._together = together
        self._index = index
        self._own = folder / f"{index}-{os.getpid()}{_ENDING}"

    def sum_up(self) -> None:
        """Make one page of those of this place's lives that are over."""
        past = self._folder / f"{self._index}-0{_ENDING}"
        found = [file for file in self._files(self._index) if not _lives(file)]
        if [file for file in found if file != past]:
            pages = Pages(self._together)
            for file in found:
                pages.add(file.read_bytes(), past=True)
            _write(past, pages.render())
            for file in found:
                if file != past:
                    file.unlink(missing_ok=True)

    def keep(self, page: bytes) -> None:
        """Keep what this life shows."""
        _write(self._own, page)

    def unheard(self, heard: set[int]) -> list[bytes]:
        """The pages of lives that are over, or of routers that did not answer when asked.

        Args:
            heard: Process ids of those that did.
        """
        pages = []
        for file in self._files():
            if file != self._own and _pid(file) not in heard:
                with contextlib.suppress(FileNotFoundError):  # summed up this moment
                    pages.append(file.read_bytes())
        return pages

    def _files(self, index: int | None = None) -> list[Path]:
        place = "*" if index is None else index
        return sorted(self._folder.glob(f"{place}-*{_ENDING}"))


def _pid(file: Path) -> int:
    return int(file.stem.partition("-")[2])


def _lives(file: Path) -> bool:
    pid = _pid(file)
    return pid > 0 and Path(f"/proc/{pid}").exists()


def _write(file: Path, page: bytes) -> None:
    scratch = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # a full disk: what is shown may fall
        scratch.write_bytes(page)
        scratch.replace(file)
