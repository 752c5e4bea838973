"""These tests need ``TRITON_INTERPRET=1`` from the start: see ``tests/engine/test_cuda.py``."""

import os
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter itself does what numpy is about to forbid."""
    known = "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
    for item in items:
        item.add_marker(pytest.mark.filterwarnings(known))


Reference = Callable[..., torch.Tensor]


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int = 0
) -> torch.Tensor:
    """``q [T, H, D]`` at ``start ...`` over ``k, v [S, K, D]``, in fp32."""
    keys, positions = torch.arange(k.shape[0]), torch.arange(start, start + len(q)).view(-1, 1)
    seen = keys <= positions
    if window:
        seen &= keys > positions - window
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return out.transpose(0, 1)


@pytest.fixture
def sdpa() -> Reference:
    return _sdpa


@pytest.fixture
def scattered() -> Callable[..., list[list[int]]]:
    """Block tables out of order and between each other's blocks, from block 1 on."""

    def make(lengths: Sequence[int], block: int) -> list[list[int]]:
        counts = [-(-length // block) for length in lengths]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(5)) + 1
        return [part.tolist() for part in order.split(counts)]

    return make
