"""Which rank sends which KV heads to which rank, for any two tensor-parallel widths.

``engine/core/split.py`` says who owns what: uneven splits work, and with more ranks than heads
neighbours hold the same head.
"""

from dataclasses import dataclass

from engine.core.split import owned_heads


@dataclass(frozen=True, slots=True)
class Edge:
    """Heads ``[head_begin, head_begin + head_count)`` go from one rank to one rank."""

    sender: int
    receiver: int
    head_begin: int
    head_count: int


def edges(senders: int, receivers: int, heads: int) -> list[Edge]:
    """Every head to every rank that needs it, once: replicas on the sending side stay silent.

    Args:
        senders: Tensor-parallel width on the prefill side.
        receivers: Width on the decode side.
        heads: KV heads of the model.
    """
    plan: list[Edge] = []
    for receiver in range(receivers):
        missing = set(owned_heads(receiver, receivers, heads))
        for sender in range(senders):
            sent = sorted(missing.intersection(owned_heads(sender, senders, heads)))
            if sent:
                missing.difference_update(sent)
                plan.append(Edge(sender, receiver, sent[0], len(sent)))
    return plan
