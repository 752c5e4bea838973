"""The time of steps is divided among requests without a rest."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.core.core import divided
from baton.engine.core.sequence import Kind
from baton.types import events as ev
from tests.engine.core.test_scheduler import make_core, request

DECODE = SimpleNamespace(decodes=True, cost_tokens=1)


def prompt(tokens: int) -> SimpleNamespace:
    return SimpleNamespace(decodes=False, cost_tokens=tokens)


@pytest.mark.parametrize(
    ("rows", "token_ns", "decode_ns", "parts"),
    [
        ([DECODE, DECODE], 5.0, 100.0, [600, 600]),
        ([prompt(300), prompt(100)], 5.0, 100.0, [900, 300]),
        # 400 tokens take 2000 of 3000: 800 of 1200, and each decode 200.
        ([DECODE, prompt(400), DECODE], 5.0, 1000.0, [200, 800, 200]),
        ([DECODE, prompt(9), DECODE, prompt(1)], 0.0, 0.0, [100, 900, 100, 100]),
        ([], 5.0, 100.0, []),
    ],
)
def test_each_row_has_its_part(rows, token_ns, decode_ns, parts) -> None:
    assert divided(rows, 1200, token_ns, decode_ns) == parts


ROWS = st.lists(st.one_of(st.just(DECODE), st.integers(1, 8192).map(prompt)), min_size=1)
TIMES = st.floats(0.0, 1e9)


@given(rows=ROWS, duration_ns=st.integers(0, 10**12), token_ns=TIMES, decode_ns=TIMES)
def test_parts_add_up_to_the_step(rows, duration_ns, token_ns, decode_ns) -> None:
    parts = divided(rows, duration_ns, token_ns, decode_ns)
    assert sum(parts) == duration_ns
    assert min(parts) >= 0


def test_what_requests_are_told_adds_up_to_all_steps() -> None:
    """Prompts, several choices, preemptions, and prompts for other workers."""
    core = make_core(blocks=24, step_tokens=64)
    for number in range(6):
        tokens = [number * 50 + place for place in range(40)]
        core.scheduler.submit(request(f"r{number}", tokens, n=1 + number % 2, ticket=number), 0)
    core.scheduler.submit(request("remote", [7] * 50, Kind.PREFILL, ticket=9), 0)
    events: list[ev.Event] = []
    spent_ns = 0
    for step in range(1, 1000):
        plan = core.plan(step)
        if not plan.rows:
            break
        duration_ns = 1_000_003 * step
        spent_ns += duration_ns
        events += core.apply(plan, core.runner.execute(plan), step, duration_ns)
        if any(isinstance(event, ev.PromptDone) for event in events):
            core.scheduler.release("remote")
    events += core.take_events()
    ended = [event for event in events if isinstance(event, ev.Ended)]
    (done,) = [event for event in events if isinstance(event, ev.PromptDone)]
    assert len(ended) == 7 and any(event.preemptions for event in ended)
    assert sum(event.input_ns + event.output_ns for event in ended) == spent_ns
    (remote,) = [event for event in ended if event.request_id == "remote"]
    assert done.computed_ns == remote.input_ns + remote.output_ns > 0
    assert all(event.input_ns and event.output_ns for event in ended if event is not remote)
