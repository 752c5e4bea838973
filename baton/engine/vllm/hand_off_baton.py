"""Hand-off by Baton's own transports (``hand_off: baton``): pages of the worker's KV pool."""

import asyncio
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from baton.engine.remote.live_request import LiveRequest, Parameters, Saved
from baton.engine.vllm import protocol
from baton.engine.vllm.facts import VllmFacts
from baton.engine.vllm.hand_off import HandOff
from baton.engine.vllm.server import GENERATIONS, SAVES
from baton.engine.vllm.staging import Staging

_SAVED = struct.Struct("<qqqqq")  # generation of a hand-off, saved pages, layers of all, rank


class BatonHandOff(HandOff):
    """Pages that vLLM's connector fills and reads, and that Baton's transports send.

    The KV is complete in the pages when vLLM loads it, so that it cannot be sent again.

    Args:
        folder: Folder with the file and the socket that vLLM's connector uses.
        send: Sends reports to the shell.
    """

    repeats = False

    def __init__(self, folder: str, facts: VllmFacts, send: Callable[..., None]) -> None:
        file = f"{folder}/{GENERATIONS}"
        generations = np.memmap(file, np.int64, "r+", shape=(facts.pool_blocks,))
        self._staging = Staging(generations, facts.block_tokens, facts.width)
        self._reports = SaveReports(f"{folder}/{SAVES}", self._saved, self._staging.ended)
        self._send = send

    def take(self, request: LiveRequest) -> bool:
        """Take the pages of a prompt; return whether there are enough."""
        return self._staging.take(request, min(request.open_choices))

    def bind(self, request: LiveRequest) -> None:
        """Take the pages of a reservation as soon as there are enough."""
        self._send(*self._staging.bind(request))

    def release(self, request: LiveRequest) -> None:
        """Free the pages, unless vLLM may write into them."""
        self._send(*self._staging.release(request))

    def to_save(self, request: LiveRequest, choice: int) -> Parameters | None:
        """Return the pages, for the choice whose vLLM request fills them."""
        return self._staging.to_save(request) if choice == request.saving else None

    async def until_written(self, request: LiveRequest, response: bytes) -> None:
        """Wait for the reports of vLLM's ranks, which may follow the response."""
        if protocol.is_aborted(response):
            await request.until_ended()
        else:
            await request.until_saved(protocol.saving_pages(response))
        self._staging.saved(request)

    def held(self, request: LiveRequest, returned: Parameters | None) -> Parameters:
        """Check that vLLM has saved the prompt; its pages need no parameters."""
        self._staging.check_saved(request, returned)
        return {}

    def publish(self, request: LiveRequest) -> bytes:
        """Report that all pages of a prompt can be read."""
        if request.pages:
            self._send(*self._staging.published(request))
        return b""

    def to_load(self, request: LiveRequest, data: bytes) -> list[Parameters]:
        """Return the same pages for all choices."""
        return [self._staging.to_load(request)] * request.spec.params.n

    def close(self) -> None:
        """Close the socket of vLLM's reports."""
        self._reports.close()

    def _saved(self, generation: int, saved: Saved, rank: int) -> None:
        """Publish what vLLM has saved of a prompt, while it computes the rest."""
        self._send(*self._staging.progressed(generation, saved, rank))


class SaveReports:
    """Socket that vLLM's connector sends to.

    Args:
        path: Path of the socket, which must not exist.
        on_saved: Called with the generation of a hand-off, what a rank has saved, and the rank.
        on_ended: Called with generation and rank when the rank writes no more.
    """

    def __init__(
        self,
        path: str,
        on_saved: Callable[[int, Saved, int], None],
        on_ended: Callable[[int, int], None],
    ) -> None:
        self._on_saved = on_saved
        self._on_ended = on_ended
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(path)
        self._path = Path(path)
        asyncio.get_running_loop().add_reader(self._socket, self._receive)

    def close(self) -> None:
        """Remove the socket, so that vLLM's reports are lost."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _receive(self) -> None:
        received = self._socket.recv(_SAVED.size)
        generation, pages, layers, all_layers, rank = _SAVED.unpack(received)
        if layers < 0:
            self._on_ended(generation, rank)
            return
        complete = pages < 0 or layers == all_layers
        saved = Saved(pages=pages) if complete else Saved(0, pages, layers, all_layers)
        self._on_saved(generation, saved, rank)
