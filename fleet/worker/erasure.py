"""Erasure of the KV of deleted tenants at one worker, from the pool and all tiers.

The worker reads the tags of deleted tenants from Redis every second, and at its start all of them,
since files of its disk tier may be older than a deletion.
"""

import asyncio
import logging

from baton.engine.process.handle import EngineHandle
from baton.registry.redis_store import RegistryUnavailableError
from baton.tenants.erasures import Erasures

_LOG = logging.getLogger(__name__)

_POLL_S = 1.0


async def erase_forever(
    engine: EngineHandle, erasures: Erasures, worker_id: str, *, earlier: bool = True
) -> None:
    """Erase the blocks of deleted tenants, and report their number to Redis.

    Without ``earlier``, only those of tenants that are deleted from now on.
    """
    done: set[str] | None = set() if earlier else None
    unreported: dict[str, dict[str, int]] = {}
    while True:
        try:
            tags = (await erasures.forgotten()).tags
            if done is None:
                done = set(tags)
            new = {tag: deletion for tag, deletion in tags.items() if tag not in done}
            for deletion in dict.fromkeys(new.values()):
                mine = frozenset(bytes.fromhex(tag) for tag in new if new[tag] == deletion)
                unreported[deletion] = counts = await engine.forget(mine)
                if any(counts.values()):
                    _LOG.info("erased KV of a deleted tenant deletion=%s: %s", deletion, counts)
                done.update(tag for tag in new if new[tag] == deletion)
            for deletion in list(unreported):
                await erasures.report(deletion, worker_id, unreported[deletion])
                del unreported[deletion]
        except RegistryUnavailableError:
            pass  # the registry counts it
        await asyncio.sleep(_POLL_S)
