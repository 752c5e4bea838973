"""The sampling kernel draws what the host draws."""

import numpy as np
import pytest
import torch

from engine import sampling
from engine.core.params import SamplingParams
from engine.core.plan import SampleSpec
from engine.kernels.rows import draw


def on_the_host(row: torch.Tensor, spec: SampleSpec) -> int:
    return sampling.sample(sampling.Logits(row.view(1, -1)), [[spec]], ())[0][0].token


def specs() -> list[SampleSpec]:
    drawn = [
        (0.0, 5, 0, 3),
        (1.0, 5, 0, 3),
        (1.0, 5, 1, 3),
        (0.7, (1 << 64) - 3, 0, 1000),
        (2.5, 0, 2, 1),
    ]
    return [
        SampleSpec(choice, SamplingParams(max_tokens=1, temperature=t, seed=s), [0] * length, 0)
        for t, s, choice, length in drawn
    ]


@pytest.mark.parametrize("vocabulary", [9, 1300])
def test_it_draws_the_tokens_of_the_host(vocabulary: int) -> None:
    torch.manual_seed(0)
    wanted = specs()
    logits = torch.randn(len(wanted), vocabulary)
    seeds = [np.uint64(spec.params.seed).astype(np.int64).item() for spec in wanted]
    got = draw(
        logits,
        torch.tensor([spec.params.temperature for spec in wanted], dtype=torch.float64),
        torch.tensor(seeds),
        torch.tensor([spec.choice for spec in wanted]),
        torch.tensor([len(spec.history) for spec in wanted]),
    )
    expected = [on_the_host(row, spec) for row, spec in zip(logits, wanted, strict=True)]
    assert got.tolist() == expected


def test_equal_logits_give_the_smallest_id() -> None:
    logits = torch.zeros(1, 1500)
    logits[0, [7, 400, 1400]] = 3.0
    zeros = torch.zeros(1, dtype=torch.int64)
    assert draw(logits, zeros.double(), zeros, zeros, zeros).tolist() == [7]
