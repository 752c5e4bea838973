"""Mixture of experts: each token is computed by the few experts that its router chose.

In ``exact``, a token's result must not depend on the other tokens of its batch, though an expert
gets just those rows that chose it. Three rules ensure it. An expert's products are cut into the row
counts that were probed for its shape, like any other (``baton/engine/cpu/linear.py``). The choice
is a function of the token's row alone. A token's results are added in the order of the experts.
"""

# ruff: noqa: N803, N806 - suffixes such as q_THD give shapes

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from baton.engine.cpu.linear import Linear

Project = Callable[[Linear, str, torch.Tensor], torch.Tensor]
"""``(linear, name within the layer, rows) -> rows``."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of one layer.

    Attributes:
        router: Weight ``[N, E]`` that gives a score for each expert.
        chosen: Number of experts that compute a token.
        normalise: Whether the weights of the chosen add up to one.
        biases: Bias in fp32 by the name of the product; ``None`` if the family has none.
    """

    router: Linear
    gate_up: Sequence[Linear]
    down: Sequence[Linear]
    chosen: int
    normalise: bool
    biases: Mapping[str, torch.Tensor | None]

    def __call__(
        self,
        h_TE: torch.Tensor,
        gate: Callable[[torch.Tensor], torch.Tensor],
        project: Project,
    ) -> torch.Tensor:
        """Compute ``[T, E] -> [T, E]``, fp32.

        Args:
            h_TE: Normed rows.
            gate: Activation, ``[T, 2 F] -> [T, F]``.
            project: Computes a product; an expert's has the rows that chose it, in their order.
        """

        def product(linear: Linear, name: str, x: torch.Tensor) -> torch.Tensor:
            y = project(linear, name, x)
            bias = self.biases[name]
            return y if bias is None else y.float() + bias

        scores_TN = product(self.router, "router", h_TE).float()
        weights_TC, ids_TC = scores_TN.softmax(-1).topk(self.chosen, dim=-1)
        if self.normalise:
            weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True)
        out_TE = torch.zeros(h_TE.shape, dtype=torch.float32)
        for expert in sorted(set(ids_TC.flatten().tolist())):
            rows, place = torch.where(ids_TC == expert)
            act = gate(product(self.gate_up[expert], f"experts.{expert}.gate_up", h_TE[rows]))
            part = product(self.down[expert], f"experts.{expert}.down", act)
            out_TE[rows] += part.float() * weights_TC[rows, place, None]
        return out_TE
