"""The sampling kernel draws what the host draws."""

import numpy as np
import pytest
import torch

from baton.engine.core.plan import SampleSpec
from baton.engine.cuda.kernels.rows import cuts, sample_tokens
from baton.engine.sampling import sample as sampling
from baton.types.params import SamplingParams


def on_the_host(row: torch.Tensor, spec: SampleSpec) -> int:
    return sampling.Logits(row.view(1, -1)).sample([[spec]], ())[0][0].token


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
    got = sample_tokens(
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
    assert sample_tokens(logits, zeros.double(), zeros, zeros, zeros).tolist() == [7]


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 5000},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"min_p": 0.2},
    {"min_p": 0.05, "top_k": 20, "top_p": 0.8},
    {"min_p": 1e-9, "top_p": 1e-9},
]


@pytest.mark.parametrize("vocabulary", [9, 2500])
def test_filters_leave_the_tokens_that_the_host_leaves(vocabulary: int) -> None:
    torch.manual_seed(0)
    every = [
        SamplingParams(max_tokens=1, temperature=1.7, seed=i, **f) for i, f in enumerate(FILTERS)
    ]
    logits = 3 * torch.randn(len(every), vocabulary)

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(p, name) for p in every], dtype=dtype)

    temperatures = column("temperature", torch.float64)
    least = cuts(
        logits,
        temperatures,
        column("top_k", torch.int32),
        column("top_p", torch.float64),
        column("min_p", torch.float64),
    )
    for row_V, params, cut in zip(logits, every, least, strict=True):
        left = sampling.candidates(row_V.double().numpy() / 1.7, params)
        expected = set(range(vocabulary)) if left is None else set(left.tolist())
        assert set(torch.nonzero(row_V >= cut).flatten().tolist()) == expected, params
    seeds, zeros = column("seed", torch.int64), torch.zeros(len(every), dtype=torch.int64)
    drawn = sample_tokens(logits, temperatures, seeds, zeros, zeros + 3, least)
    wanted = [
        on_the_host(row_V, SampleSpec(0, params, [0] * 3, 0))
        for row_V, params in zip(logits, every, strict=True)
    ]
    assert drawn.tolist() == wanted
