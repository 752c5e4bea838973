"""Waits until nothing is left at a worker that is to end."""

import asyncio
from collections.abc import Callable

GIVES_S = 0.5
"""For whoever goes on with what ran here to pull its KV from the cache."""
_LOOK_S = 0.05


async def drained(
    busy: Callable[[], bool], timeout_s: float, hurried: asyncio.Event | None = None
) -> bool:
    """Wait until it is idle, and was for ``GIVES_S`` if it was not idle from the start.

    Args:
        busy: Whether requests, or hand-offs to others, are left.
        timeout_s: Wait no longer.
        hurried: Set to wait no longer.

    Returns:
        Whether nothing was left.
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
        await asyncio.sleep(_LOOK_S)
