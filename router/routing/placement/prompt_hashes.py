"""Hashes of a prompt's blocks, as the workers compute them, concatenated."""

from collections.abc import Sequence

from batonpb.common_pb2 import Capabilities

from baton.engine.block_names import packed_names
from baton.types.block_hashes import hash_seed, seed_past_baton
from baton.wire.compatibility import format_id, kv_format
from baton.wire.tokens import pack_tokens
from router.request import GenerationRequest
from router.routing.workers.slot import WorkerSlot

_MAX_SEEDS = 1024
_LONG_TOKENS = 4096  # shorter prompts are hashed at their placement in 0.1 ms


class HashSeedCache:
    """Bounded cache of block hash seeds by KV format, adapter and cache scope."""

    def __init__(self) -> None:
        self._seeds: dict[tuple[str, str, str], bytes] = {}
        self._formats: dict[int, tuple[Capabilities, str]] = {}  # by id of the object, kept alive
        self.latest: Capabilities | None = None  # of the last placement

    def seed(self, request: GenerationRequest, capabilities: Capabilities) -> bytes:
        """Return the seed of the request's block hashes on a worker with these capabilities."""
        if request.past_baton:
            return seed_past_baton([request.cache_scope] if request.cache_scope else [])
        digest = request.adapter_digest
        key = (self._format(capabilities), digest, request.cache_scope)
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

    def _format(self, capabilities: Capabilities) -> str:
        known = self._formats.get(id(capabilities))
        if known is None:
            if len(self._formats) >= _MAX_SEEDS:
                self._formats.clear()
            known = self._formats[id(capabilities)] = capabilities, format_id(capabilities)
        return known[1]

    def chain(self, request: GenerationRequest) -> bytes:
        """Return seed and hashes of a long prompt, for the next placement; empty: not known yet.

        Any thread may call it, so that hashing a long prompt delays no other request.
        """
        if self.latest is None or len(request.prompt) < _LONG_TOKENS:
            return b""
        seed = self.seed(request, self.latest)
        return seed + _hashes(seed, request.hashed)


def prompt_hashes(
    request: GenerationRequest, slots: Sequence[WorkerSlot], seeds: HashSeedCache
) -> bytes:
    """Return the hashes of the prompt's full blocks, 16 bytes each.

    The workers of a fleet share one format. If some differ (a rolling upgrade), the hashes are of
    the first worker and match nothing on the others, which is safe.
    """
    link = slots[0].link
    if link is None:
        return b""
    seeds.latest = link.capabilities
    seed = seeds.seed(request, link.capabilities)
    if request.chain.startswith(seed) and not request.goes_on:
        return request.chain[len(seed) :]
    return _hashes(seed, request.hashed)


def _hashes(seed: bytes, tokens: Sequence[int]) -> bytes:
    return packed_names(seed, pack_tokens(tokens))
