"""Which rank sends which KV heads to which rank, for any two tensor-parallel widths.

Rank r of T owns heads ``floor(r*H/T)`` up to ``max(floor(r*H/T) + 1, floor((r+1)*H/T))``: uneven
splits work, and with more ranks than heads neighbours hold the same head.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edge:
    """Heads ``[head_begin, head_begin + head_count)`` go from one rank to one rank."""

    sender: int
    receiver: int
    head_begin: int
    head_count: int


def owned_heads(rank: int, ranks: int, heads: int) -> range:
    """KV heads that a rank holds."""
    begin = rank * heads // ranks
    return range(begin, max(begin + 1, (rank + 1) * heads // ranks))


def edges(senders: int, receivers: int, heads: int) -> list[Edge]:
    """Every head to every rank that needs it, once: replicas on the sending side stay silent.

    Args:
        senders: Tensor-parallel width on the prefill side.
        receivers: Width on the decode side.
        heads: KV heads of the model.
    """
    plan: list[Edge] = []
    for receiver in range(receivers):
        wanted = set(owned_heads(receiver, receivers, heads))
        for sender in range(senders):
            here = sorted(wanted.intersection(owned_heads(sender, senders, heads)))
            if here:
                wanted.difference_update(here)
                plan.append(Edge(sender, receiver, here[0], len(here)))
    return plan
