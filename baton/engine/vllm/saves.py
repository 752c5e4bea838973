"""Receives the reports of vLLM's connector on saved pages (``inside/baton_kv.py``).

On CPUs a prompt is saved when vLLM responds, and reports may be lost. On GPUs vLLM may save pages
after its response, which has their number. No report is lost then, and the last one completes the
prompt. A failed save is reported as -1 pages. Each rank of vLLM reports its own part of the pages.
"""

import asyncio
import socket
import struct
from collections.abc import Callable

_SAVED = struct.Struct("<qqq")  # generation of a hand-off, saved pages of its prompt, rank


class SaveReports:
    """Socket that vLLM's connector sends to.

    Args:
        path: Path of the socket, which must not exist.
        on_saved: Called with the generation of a hand-off, the number of its first pages that a
            rank of vLLM has saved, and the rank; -1: it cannot save them.
    """

    def __init__(self, path: str, on_saved: Callable[[int, int, int], None]) -> None:
        self._on_saved = on_saved
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(path)
        asyncio.get_running_loop().add_reader(self._socket, self._receive)

    def close(self) -> None:
        """Close the socket, so that vLLM's reports are lost."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _receive(self) -> None:
        generation, pages, rank = _SAVED.unpack(self._socket.recv(_SAVED.size))
        self._on_saved(generation, pages, rank)
