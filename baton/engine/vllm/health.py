"""Health of one vLLM: whether its API server and its engine core live."""

import asyncio
import sys
from collections.abc import Callable

from baton.engine.vllm import http
from baton.types.errors import UnavailableError

HEALTH_S = 8.0
"""Time for vLLM's API server to respond, which is slow on busy cores."""

_POLL_S = 0.5
_DEATH_CHECKS = 3  # after an internal error


class Health:
    """Checks of one vLLM.

    Args:
        vllm: Process of its API server.
        socket: Path of its socket.
    """

    def __init__(self, vllm: asyncio.subprocess.Process, socket: str) -> None:
        self._vllm = vllm
        self._socket = socket

    async def watch(self, alive: Callable[[], None], dead: Callable[[str], None]) -> None:
        """Call ``alive`` as long as the API server responds, ``dead`` if its engine core is."""
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                await self._ask()
            except http.StatusError as error:  # 503: its engine core is dead
                dead(error.message)
            except UnavailableError as error:
                log(error.message)
            else:
                alive()

    async def is_dying(self) -> bool:
        """Return whether vLLM exits, or reports a dead engine, soon after an internal error."""
        for _ in range(_DEATH_CHECKS):
            if self._vllm.returncode is not None:
                return True
            try:
                await self._ask()
            except UnavailableError:
                return True
            await asyncio.sleep(_POLL_S)
        return False

    async def _ask(self) -> None:
        await http.fetch(self._socket, "GET", "/health", HEALTH_S)


def log(text: str) -> None:
    """Write a line to the worker's engine log."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
