"""A compiler that rounds differently in the two loops over keys is found out."""

from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from baton.engine.cuda.kernels.device import attention
from baton.engine.cuda.selftest import verify_exact
from baton.engine.numerics import NumericsSetupError
from benchmarks.gpu.checks import exact_positions
from tests.engine.cuda import tiny

HEADS = [  # 1, 3, 4 and 8 heads for each KV head
    pytest.param(1, 1, marks=pytest.mark.slow),
    pytest.param(3, 1, marks=pytest.mark.slow),
    (4, 1),
    pytest.param(8, 1, marks=pytest.mark.slow),
]


@pytest.fixture
def unfused_under_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds scores twice in the loop with a mask, as LLVM made of the kernel before."""
    masked = False
    attend_keys = attention.attend_keys
    fused = InterpreterBuilder.create_fma

    def watched(*args: Any) -> Any:
        nonlocal masked
        masked = bool(args[18])
        return attend_keys(*args)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if masked:
            return TensorHandle(np.add(x.data * y.data, z.data), z.dtype.scalar)
        return fused(self, x, y, z)

    assert attend_keys.arg_names[18] == "MASKED"
    monkeypatch.setattr(attention, "attend_keys", watched)
    monkeypatch.setattr(InterpreterBuilder, "create_fma", fma)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_the_check_of_positions_finds_the_loop_that_rounds_twice(
    unfused_under_a_mask: None, heads: int, kv_heads: int
) -> None:
    wrong = exact_positions(heads, kv_heads, 16, 260, torch.device("cpu"))
    assert wrong
    assert min(wrong) >= 63, "the first key tile is complete there"


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_the_check_of_positions_passes_for_the_kernels(heads: int, kv_heads: int) -> None:
    assert exact_positions(heads, kv_heads, 16, 260, torch.device("cpu")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_the_self_test_finds_the_loop_that_rounds_twice(
    unfused_under_a_mask: None, heads: int, kv_heads: int
) -> None:
    shape = tiny.config(heads=heads, kv_heads=kv_heads, layers=1, max_context_tokens=130)
    decoder = tiny.decoder(shape)
    with pytest.raises(NumericsSetupError, match="of 130 positions decoded alone differ"):
        verify_exact(decoder)
