"""Blocks that stay cached because clients have asked for it, by tenant.

A pin is soft: pinned blocks are evicted last, not never. Each tenant has a budget; above it, its
oldest pins end. Ended pins are not looked for, an eviction that comes to their block sees them.
"""

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import NamedTuple


class Retention(NamedTuple):
    """Hint of a client about the time that the blocks of its request stay cached.

    Attributes:
        keep_s: Time since the end of the request; 0: pins of its blocks end.
        share: Part of the worker's blocks that the tenant may pin.
    """

    keep_s: int
    share: float


class PinnedBlocks:
    """Pins of the blocks of a pool.

    Attributes:
        now_ns: Present time, set from outside.
    """

    def __init__(self, total: int) -> None:
        self.now_ns = 0
        self._total = total
        self._tenant_of: dict[int, str] = {}
        self._until_ns: dict[str, OrderedDict[int, int]] = {}  # of blocks, the oldest pin first

    def __len__(self) -> int:
        """Return the number of blocks with a pin, ended ones included."""
        return len(self._tenant_of)

    def holds(self, block: int) -> bool:
        """Return whether a block has a pin that has not ended."""
        tenant = self._tenant_of.get(block)
        return tenant is not None and self._until_ns[tenant][block] > self.now_ns

    def keep(self, blocks: Sequence[int], tenant: str, retention: Retention) -> None:
        """Pin the leading blocks of a sequence, or end their pins.

        A pin of another tenant that ends later stays. Above the budget pins whose time is over go
        first, then the oldest; of the sequence the first blocks are pinned.
        """
        until_ns = self.now_ns + retention.keep_s * 1_000_000_000
        most = int(retention.share * self._total)
        for block in reversed(blocks):
            owner = self._tenant_of.get(block, tenant)
            if not retention.keep_s:
                if owner == tenant:
                    self.forget(block)
                continue
            before_ns = self._until_ns[owner].get(block, 0) if owner in self._until_ns else 0
            if owner != tenant and before_ns >= until_ns:
                continue
            self.forget(block)
            self._tenant_of[block] = tenant
            self._until_ns.setdefault(tenant, OrderedDict())[block] = max(until_ns, before_ns)
        pins = self._until_ns.get(tenant, OrderedDict())
        ended = [block for block, at_ns in pins.items() if at_ns <= self.now_ns]
        while len(pins) > most:
            self.forget(ended.pop() if ended else next(iter(pins)))

    def forget(self, block: int) -> None:
        """End the pin of a block, if it has one."""
        tenant = self._tenant_of.pop(block, None)
        if tenant is not None:
            pins = self._until_ns[tenant]
            del pins[block]
            if not pins:
                del self._until_ns[tenant]

    def check(self, findable: Container[int]) -> None:
        """Recount everything; raise ``RuntimeError`` if it is wrong."""
        listed = {b: tenant for tenant, pins in self._until_ns.items() for b in pins}
        if listed != self._tenant_of or not all(block in findable for block in listed):
            raise RuntimeError(f"{len(listed)} pins are listed, {len(self._tenant_of)} counted")
