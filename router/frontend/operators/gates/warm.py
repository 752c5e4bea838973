"""Loading of an adapter at all workers of its model, before a name leads to it."""

import asyncio
from dataclasses import replace

from baton.types.errors import BatonError, UnavailableError
from baton.types.params import AdapterRef
from router.lane import Lane
from router.request import Pinned
from router.routing.requests.readiness import (
    PROBE_PROMPT,
    PROBE_SAMPLING,
    pinned_request,
    probed,
    usable_pairs,
)

_AT_ONCE = 4
_TIMEOUT_S = 30.0


async def warm(lane: Lane, name: str) -> None:
    """Let each ready worker of a lane run a short request with an adapter, which loads it.

    Nothing happens if the name is that of the lane's model.

    Raises:
        UnavailableError: No worker is ready, or one cannot load the adapter.
    """
    adapter = lane.model.adapter_of(name)
    if adapter is None:
        return
    pairs = usable_pairs(lane.gateway, 0)
    if not pairs:
        raise UnavailableError(f"no worker of {lane.model.names[0]} is ready to load {name}")
    gate = asyncio.Semaphore(_AT_ONCE)
    await asyncio.gather(*(_load(lane, adapter, pair, gate) for pair in pairs))


async def _load(lane: Lane, adapter: AdapterRef, pair: Pinned, gate: asyncio.Semaphore) -> None:
    async with gate:
        request = pinned_request("warm", PROBE_PROMPT, PROBE_SAMPLING, pair, _TIMEOUT_S)
        request = replace(request, adapter=adapter)
        try:
            error: BatonError | None = (await probed(lane.gateway, request)).record.error
        except BatonError as refused:
            error = refused
        if error is not None:
            where = " and ".join(filter(None, (pair.prefill, pair.decode)))
            raise UnavailableError(f"{where} cannot run {adapter.name}: {error.message}")
