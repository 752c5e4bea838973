"""State of a worker from its load report."""

import pytest
from batonpb.common_pb2 import WorkerStatus

from baton.planner.state import state_of
from baton.types.step_lines import PromptLine


def test_without_long_steps_the_rate_of_prompts_counts() -> None:
    """Else a planner of fast engines with short prompts had no figures."""
    report = WorkerStatus(prefill_tokens_per_s=4000.0)
    state = state_of("w", "prefill", report, 8)
    assert state.prompt_line == PromptLine(token_s=pytest.approx(1 / 4000), context_s=0.0)
    report.prefill_token_s = 1e-4
    report.prefill_context_s = 1e-8
    line = state_of("w", "prefill", report, 8).prompt_line
    assert line == PromptLine(token_s=1e-4, context_s=1e-8)
    assert not state_of("w", "decode", WorkerStatus(), 8).prompt_line.token_s
