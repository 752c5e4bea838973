"""LoRA adapters in the decoders: the deltas of each product, and the rows of each adapter.

The decoders compute q, k, v in one product and gate, up in another; an adapter's parts are joined
alike, so that one such product gets one delta (``baton/engine/loading/lora_weights.py``).
"""

# ruff: noqa: N803 - suffixes such as x_TK give shapes

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from baton.engine.core.plan import PlanRow

PRODUCTS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Adapter targets that each product of a layer joins."""

Product = Callable[[torch.Tensor], torch.Tensor]
"""Matrix product ``[T, K] -> [T, N]``."""


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """Delta of one adapter for one product of one layer: ``x_TK @ A_RK.T @ B_NR.T``."""

    a: Product
    b: Product

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Return the delta ``[T, N]`` of rows ``[T, K]``."""
        return self.b(self.a(x_TK))


Adapter = dict[tuple[int, str], LoraDelta]
"""Deltas by (layer, product)."""


def rows_by_adapter(rows: Sequence[PlanRow], ends: Sequence[int]) -> dict[str, list[int]]:
    """Return the flat rows of each adapter of a step, ascending; rows without one are left out.

    ``ends`` is the end of each plan row's flat rows.
    """
    groups: dict[str, list[int]] = {}
    for row, end in zip(rows, ends, strict=True):
        if row.adapter:
            groups.setdefault(row.adapter, []).extend(range(end - len(row.tokens), end))
    return {adapter: sorted(flat_rows) for adapter, flat_rows in groups.items()}
