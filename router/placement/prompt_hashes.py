"""Hashes of a prompt's blocks, as the workers compute them."""

from collections.abc import Sequence

from batonpb.common_pb2 import Capabilities

from engine.core.block_hashes import block_hashes, hash_seed
from router.request import GenerationRequest
from router.workers.table import Slot
from wire.compatibility import format_id, kv_format

_MAX_SEEDS = 1024


class HashSeedCache:
    """Seeds of block hashes by KV format, adapter and scope: a tenant with a salt (bounded)."""

    def __init__(self) -> None:
        self._seeds: dict[tuple[str, str, str], bytes] = {}

    def seed(self, request: GenerationRequest, capabilities: Capabilities) -> bytes:
        """The seed of the request's block hashes on a worker of these capabilities."""
        digest = request.adapter_digest
        key = (format_id(capabilities), digest, request.cache_scope)
        seed = self._seeds.get(key)
        if seed is None:
            if len(self._seeds) >= _MAX_SEEDS:
                self._seeds.clear()
            seed = self._seeds[key] = hash_seed(
                capabilities.weights_digest,
                kv_format(capabilities),
                capabilities.numerics_id,
                digest,
                request.cache_scope,
            )
        return seed


def prompt_hashes(
    request: GenerationRequest, slots: Sequence[Slot], seeds: HashSeedCache
) -> list[bytes]:
    """Hashes of the prompt's full blocks.

    The workers of a fleet share one format. Where some differ (a rolling upgrade), the hashes are
    those of the first worker and match nothing on the others, which is safe.
    """
    link = slots[0].link
    if link is None:
        return []
    return block_hashes(seeds.seed(request, link.capabilities), request.prompt)
