"""From whom leading blocks of a prompt are had, one giver after the other. Pure.

    held here ──▶ the link from who is near and has some ──▶ from who has more ──▶ the rest

Each link brings what its giver has beyond all that came before it, at its edge's rate and after a
turn. What pulled blocks cost is the same wherever they lie in a prompt, and computing them costs
more the later they lie: so what is computed lies behind all that is pulled.
"""

from collections.abc import Sequence
from typing import NamedTuple

# Before the first byte of a link comes: two engines are asked, each between two of its steps.
PULL_OVERHEAD_S = 0.03
# So many of those that hold most are priced for a prompt, and pulled from.
MAX_GIVERS = 4
MAX_LINKS = 3
# Rates that differ by less are one: edges that others use at the same time look so slow. If always
# the same worker gives, its copy stays in its cache, and others make room.
CLEARLY_FASTER = 2.0


class Giver(NamedTuple):
    """A worker that others can have leading blocks of a prompt from, and how many."""

    worker_id: str
    blocks: int


class Chain(NamedTuple):
    """Givers in the order in which they are asked, each of more blocks; how long that takes."""

    links: tuple[Giver, ...]
    seconds: float


def cheapest_chains(
    held_blocks: int,
    givers: Sequence[Giver],
    bytes_per_s: Sequence[float],
    block_bytes: int,
) -> list[Chain]:
    """For each end that may be worth it the cheapest chain, of ``MAX_LINKS`` at most.

    Args:
        held_blocks: Leading ones that are here already.
        givers: Those with most blocks first.
        bytes_per_s: From each of them.
        block_bytes: Of one block.

    Returns:
        Those that bring most first; none where nobody has more than is here.
    """
    ends: list[tuple[Giver, float]] = []
    for giver, rate in zip(givers, bytes_per_s, strict=True):
        # Who is not clearly faster than one that has as much is of no use.
        if giver.blocks > held_blocks and (not ends or rate > ends[-1][1] * CLEARLY_FASTER):
            ends.append((giver, rate))

    def link_s(giver: Giver, rate: float, before: int) -> float:
        return PULL_OVERHEAD_S + (giver.blocks - before) * block_bytes / rate

    chains = [Chain((giver,), link_s(giver, rate, held_blocks)) for giver, rate in ends]
    for _ in range(min(MAX_LINKS, len(ends)) - 1):
        longer = list(chains)
        for end, (giver, rate) in enumerate(ends):
            for before in chains[end + 1 :]:
                seconds = before.seconds + link_s(giver, rate, before.links[-1].blocks)
                if seconds < longer[end].seconds:
                    longer[end] = Chain((*before.links, giver), seconds)
        chains = longer
    return chains
