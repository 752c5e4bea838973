"""Synchronises the device's pool with the one in host memory, which KV transfers use.

The worker's shell reads and writes pages in shared host memory
(``baton/engine/process/client.py``), without reporting which. So host memory is authoritative
between steps. The KV that a step computes is copied to it before the step ends. A sequence whose KV
this runner did not just compute (transferred, cached or resumed) has its pages copied to the device
first.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from baton.engine.core.plan import PlanRow, StepPlan


@dataclass(slots=True)
class _Known:
    blocks: list[int]
    end: int


class HostPoolSync:
    """Keeps both pools equal where steps read them.

    Args:
        host: Pool ``[L, 2, blocks, token, K, D]`` in host memory.
        device: The same on the device; on the CPU a second tensor (interpreter).
    """

    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self._host = host
        self._device = device
        self._known: dict[int, _Known] = {}

    def before(self, plan: StepPlan) -> None:
        """Execute the plan's copies, and copy missing pages to the device."""
        for source, target in plan.copies:
            self._host[:, :, target].copy_(self._host[:, :, source])
        size = self._host.shape[3]
        missing: set[int] = set()
        seen: dict[int, _Known] = {}
        for row in plan.rows:
            known = self._known.get(row.sequence_id)
            blocks = list(row.block_ids[: -(-row.start // size)])
            # a row may begin before the end of the last one, whose draft tokens were wrong
            if known is None or known.end < row.start or known.blocks[: len(blocks)] != blocks:
                missing.update(blocks)
            seen[row.sequence_id] = _Known(list(row.block_ids), row.start + len(row.tokens))
        missing.update(target for _, target in plan.copies)
        # a sequence outside this plan is checked again when it returns
        self._known = seen
        if missing:
            index = torch.tensor(sorted(missing))
            pages = self._host.index_select(2, index).to(self._device.device)
            self._device.index_copy_(2, index.to(self._device.device), pages)

    def after(self, rows: Iterable[PlanRow]) -> None:
        """Copy the KV of the rows to host memory; waits for the device."""
        slots = self.slots(rows)
        device_slots = slots.to(self._device.device)
        written = self._tokens(self._device).index_select(2, device_slots).to(self._host.device)
        self._tokens(self._host).index_copy_(2, slots, written)

    def clear(self, rows: Iterable[PlanRow]) -> None:
        """Zero the KV of the rows in both pools, and forget their sequences."""
        rows = list(rows)
        slots = self.slots(rows)
        self._tokens(self._host).index_fill_(2, slots, 0.0)
        self._tokens(self._device).index_fill_(2, slots.to(self._device.device), 0.0)
        for row in rows:
            self._known.pop(row.sequence_id, None)

    def slots(self, rows: Iterable[PlanRow]) -> torch.Tensor:
        """Return the slots of the rows' tokens: block times block size plus offset."""
        size = self._host.shape[3]
        by_row = []
        for row in rows:
            positions = torch.arange(row.start, row.start + len(row.tokens))
            blocks = torch.tensor(row.block_ids)
            by_row.append(blocks[positions // size] * size + positions % size)
        return torch.cat(by_row)

    @staticmethod
    def _tokens(pool: torch.Tensor) -> torch.Tensor:
        layers, two, blocks, size, heads, dim = pool.shape
        return pool.view(layers, two, blocks * size, heads, dim)
