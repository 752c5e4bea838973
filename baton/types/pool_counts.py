"""Counts of the KV pool and of the tiers below it, and what a tier gained and lost."""

import msgspec


class BlockCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks by state."""

    total: int = 0
    free: int = 0
    cached: int = 0
    in_use: int = 0
    quarantined: int = 0


class TierCounts(msgspec.Struct, frozen=True, kw_only=True):
    """A tier's load; all but the first two since the start, in blocks."""

    name: str
    places: int
    held: int
    saved: int = 0
    brought: int = 0
    lost: int = 0  # gave way above before this tier could take them
    damaged: int = 0
    failed: int = 0
    late: int = 0  # prompts that waited no longer
    block_ns: float = 0.0  # for one to come back


class TierChange(msgspec.Struct, frozen=True):
    """What can be had from a tier or one above it, gained and lost."""

    tier: str
    stored: tuple[bytes, ...]
    removed: tuple[bytes, ...]
