"""Hashes of a prompt's blocks as a worker names them, and a prefill worker as decode knows it."""

from collections.abc import Sequence

from batonpb.common_pb2 import Capabilities
from batonpb.decode_pb2 import PrefillTarget

from engine.core.block_hashes import block_hashes, hash_seed
from router.requests.request import GenerationRequest
from router.workers.link import WorkerLink
from router.workers.table import Slot
from wire.compatibility import format_id, kv_format

_KEPT_SEEDS = 1024


def prefill_target(link: WorkerLink) -> PrefillTarget:
    """A prefill worker, as the decode worker needs to know it."""
    return PrefillTarget(
        worker_id=link.worker_id, incarnation=link.incarnation, address=link.address
    )


class BlockHashCache:
    """Seeds of block names by KV format, adapter and scope: a tenant with a salt (bounded)."""

    def __init__(self) -> None:
        self._seeds: dict[tuple[str, str, str], bytes] = {}

    def seed(self, request: GenerationRequest, capabilities: Capabilities) -> bytes:
        """The seed of the request's block names on a worker of these capabilities."""
        digest = request.adapter_digest
        key = (format_id(capabilities), digest, request.cache_scope)
        known = self._seeds.get(key)
        if known is None:
            if len(self._seeds) >= _KEPT_SEEDS:
                self._seeds.clear()
            known = self._seeds[key] = hash_seed(
                capabilities.weights_digest,
                kv_format(capabilities),
                capabilities.numerics_id,
                digest,
                request.cache_scope,
            )
        return known

    def of(self, request: GenerationRequest, slots: Sequence[Slot]) -> list[bytes]:
        """Names of the prompt's full blocks.

        The workers of a fleet share one format. Where some differ (a rolling upgrade), the first
        one's names find nothing on the others, which is safe.
        """
        link = slots[0].link
        if link is None:
            return []
        return block_hashes(self.seed(request, link.capabilities), request.prompt)
