"""Calls of one vLLM beside its requests: its health, the end of a request, its cache."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from baton.engine.remote.http import HttpOrigin, StatusError
from baton.engine.vllm import protocol
from baton.types.errors import UnavailableError

_LOG = logging.getLogger(__name__)

_ANSWER_S = 8.0  # for vLLM's API server to respond, which is slow on busy cores
_ERASE_S = 30.0
_POLL_S = 0.5
_DEATH_CHECKS = 3  # after an internal error


class VllmControl:
    """Calls of one vLLM.

    Args:
        origin: Its API server.
        has_exited: Returns whether the server's process is known to have ended.
    """

    def __init__(self, origin: HttpOrigin, has_exited: Callable[[], bool] = lambda: False) -> None:
        self._origin = origin
        self._has_exited = has_exited

    async def watch(self, alive: Callable[[], None], dead: Callable[[str], None]) -> None:
        """Call ``alive`` as long as the API server responds, ``dead`` if its engine core is."""
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                await self._ask()
            except StatusError as error:  # 503: its engine core is dead
                dead(error.message)
            except UnavailableError as error:
                log(error.message)
            else:
                alive()

    async def is_dying(self) -> bool:
        """Return whether vLLM exits, or reports a dead engine, soon after an internal error."""
        for _ in range(_DEATH_CHECKS):
            if self._has_exited():
                return True
            try:
                await self._ask()
            except UnavailableError:
                return True
            await asyncio.sleep(_POLL_S)
        return False

    async def abort(self, request_id: str, choice: int) -> None:
        """Abort the vLLM request of a choice; its response comes nevertheless."""
        body = protocol.abort_body(request_id, choice)
        with contextlib.suppress(UnavailableError):  # vLLM computes the prompt to its end
            await self._origin.fetch("POST", protocol.ABORT, _ANSWER_S, body)

    async def erase_cache(self) -> bool:
        """Erase the whole cache, also of running requests and in tiers; return whether vLLM did."""
        target = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
        try:
            raw = await self._origin.fetch("POST", target, _ERASE_S)
        except UnavailableError as error:
            log(error.message)
            return False
        return bool(msgspec.json.decode(raw)["success"])

    async def _ask(self) -> None:
        await self._origin.fetch("GET", "/health", _ANSWER_S)


def log(text: str) -> None:
    """Write a line to the log."""
    _LOG.warning("%s", text)
