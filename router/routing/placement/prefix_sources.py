"""Choice of the sources from which leading blocks of a prompt are pulled in turn. Pure functions.

    held here ──▶ link from a near source that has some ──▶ from one that has more ──▶ the rest

Each link brings the blocks of its source beyond all that came before, at its edge's rate and after
a fixed overhead. Pulling a block costs the same anywhere in a prompt, and computing it costs more
the later it is: so all pulled blocks precede all computed ones.
"""

from collections.abc import Sequence
from typing import NamedTuple

# Time until the first byte of a link: two engines respond, each between two of its steps.
PULL_OVERHEAD_S = 0.03
# The same for engines of others: each serves an HTTP request and computes a token for it. This is
# of two vLLMs on a CPU.
ENGINE_PULL_OVERHEAD_S = 0.1
# Number of workers with most blocks of a prompt that are priced as its sources.
MAX_SOURCES = 4
MAX_LINKS = 3
# Smaller differences in rate are ignored, as edges look slow while other pulls use them. Pulling
# from the same source each time keeps its copy in its cache, and lets others make room.
CLEARLY_FASTER = 2.0


class Source(NamedTuple):
    """Worker from which leading blocks of a prompt can be pulled, and their number.

    ``overhead_s`` is the time until the first byte, with that to bring blocks back from tiers.
    """

    worker_id: str
    blocks: int
    overhead_s: float = PULL_OVERHEAD_S

    def described(self) -> dict[str, object]:
        """Return the source as reports show it."""
        return {"worker_id": self.worker_id, "blocks": self.blocks}


class Chain(NamedTuple):
    """Sources in pull order, each with more blocks than the one before; total duration."""

    links: tuple[Source, ...]
    seconds: float


def cheapest_chains(
    held_blocks: int, sources: Sequence[Source], bytes_per_s: Sequence[float], block_bytes: int
) -> list[Chain]:
    """Return the cheapest chain of at most ``MAX_LINKS`` links for each useful last source.

    ``sources`` and the result are sorted, those with most blocks first. ``bytes_per_s`` has the
    rate of the edge from each source. ``held_blocks`` are at the worker already.
    """
    ends: list[tuple[Source, float]] = []
    for source, rate in zip(sources, bytes_per_s, strict=True):
        # A source is useless unless it is quicker than one that has as many blocks.
        is_quicker = not ends or (
            rate > ends[-1][1] * CLEARLY_FASTER or source.overhead_s < ends[-1][0].overhead_s
        )
        if source.blocks > held_blocks and is_quicker:
            ends.append((source, rate))

    def link_s(source: Source, rate: float, before: int) -> float:
        return source.overhead_s + (source.blocks - before) * block_bytes / rate

    chains = [Chain((source,), link_s(source, rate, held_blocks)) for source, rate in ends]
    for _ in range(min(MAX_LINKS, len(ends)) - 1):
        longer = list(chains)
        for end, (source, rate) in enumerate(ends):
            for before in chains[end + 1 :]:
                seconds = before.seconds + link_s(source, rate, before.links[-1].blocks)
                if seconds < longer[end].seconds:
                    longer[end] = Chain((*before.links, source), seconds)
        chains = longer
    return chains
