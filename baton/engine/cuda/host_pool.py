"""The pool of the device beside the one in host memory, from which and into which KV is handed off.

The shell of a worker reads and writes pages in shared host memory
(``baton/engine/process/client.py``), and does not say which. So host memory is the truth between
steps: what a step computes is copied to it before the step ends, and a sequence that appears with
KV that this runner did not just compute (a hand-off, a prefix hit, a resumed one) has its pages
copied to the device first.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from baton.engine.core.plan import PlanRow, StepPlan


@dataclass(slots=True)
class _Known:
    """A sequence's pages on the device: valid up to ``end``."""

    blocks: list[int]
    end: int


class HostPoolSync:
    """Keeps both pools equal where it matters.

    Args:
        host: ``[L, 2, blocks, token, K, D]`` in host memory.
        device: The same on the device; on the CPU a second tensor (interpreter).
    """

    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self._host = host
        self._device = device
        self._known: dict[int, _Known] = {}

    def before(self, plan: StepPlan) -> None:
        """Carry out the copies, and bring in what the device does not have."""
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
        # who is not in this plan is looked at again when it comes back
        self._known = seen
        if missing:
            index = torch.tensor(sorted(missing))
            pages = self._host.index_select(2, index).to(self._device.device)
            self._device.index_copy_(2, index.to(self._device.device), pages)

    def after(self, rows: Iterable[PlanRow]) -> None:
        """Copy what the rows wrote to host memory; waits for the device."""
        slots = self.slots(rows)
        device_slots = slots.to(self._device.device)
        written = self._tokens(self._device).index_select(2, device_slots).to(self._host.device)
        self._tokens(self._host).index_copy_(2, slots, written)

    def clear(self, rows: Iterable[PlanRow]) -> None:
        """Zero what the rows wrote, in both pools, and forget their sequences."""
        rows = list(rows)
        slots = self.slots(rows)
        self._tokens(self._host).index_fill_(2, slots, 0.0)
        self._tokens(self._device).index_fill_(2, slots.to(self._device.device), 0.0)
        for row in rows:
            self._known.pop(row.sequence_id, None)

    def slots(self, rows: Iterable[PlanRow]) -> torch.Tensor:
        """Where the rows' tokens stand: block times block size plus offset."""
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
