"""Counters of the KV pool and its tiers, and changes of a tier."""

import msgspec


class BlockCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Number of blocks in each state."""

    total: int = 0
    free: int = 0
    cached: int = 0
    in_use: int = 0
    quarantined: int = 0


class TierCounts(msgspec.Struct, kw_only=True):
    """Counters of a tier in blocks; all but the first three since the start."""

    name: str
    places: int = 0
    held: int = 0
    elsewhere: int = 0  # held by other workers that share the tier
    saved: int = 0
    brought: int = 0
    lost: int = 0  # evicted above before this tier had them
    damaged: int = 0
    gone: int = 0  # removed by another worker before they were read
    failed: int = 0
    late: int = 0  # restores given up as too slow
    block_ns: float = 0.0  # mean time to restore a block


class TierChange(msgspec.Struct, frozen=True):
    """Hashes that a tier and those above it gained and lost."""

    tier: str
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
