"""Waiting until a draining worker has no requests left."""

import asyncio
from collections.abc import Callable

GIVES_S = 0.5
"""Time that workers which resume requests have to pull KV from the cache here."""
_POLL_S = 0.05


async def drained(
    busy: Callable[[], bool], timeout_s: float, hurried: asyncio.Event | None = None
) -> bool:
    """Wait until the worker is idle, and ``GIVES_S`` longer if it was busy at the start.

    Returns whether it is idle; the event ``hurried`` ends the wait early.
    """
    loop = asyncio.get_running_loop()
    until_s = loop.time() + timeout_s
    idle_from_s = loop.time()
    while True:
        left = busy()
        now_s = loop.time()
        if now_s >= until_s or (hurried is not None and hurried.is_set()):
            return not left
        if left:
            idle_from_s = now_s + GIVES_S
        elif now_s >= idle_from_s:
            return True
        await asyncio.sleep(_POLL_S)
