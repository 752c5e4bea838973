"""Load of others at a server: what it reports, without the worker's own sequences."""

from baton.engine.remote.load import LoadMeter, SequenceProgress
from baton.engine.remote.others import MissingWatch, OtherLoad, ServerLoad, StallWatch


def reported(running: int, waiting: int = 0, work: float = 0.0) -> ServerLoad:
    return ServerLoad(running, waiting, prompt_tokens=100, computed_tokens=40, work=work)


def test_the_smaller_excess_of_two_reports_counts():
    others = OtherLoad()
    assert not others.observe(reported(5, work=1), own=3)
    assert others.observe(reported(9, work=2), own=3)
    assert (others.running, others.waiting) == (2, 0)
    assert others.observe(reported(4, 4, work=3), own=2)
    assert (others.running, others.waiting) == (3, 3)
    assert others.observe(reported(1, work=4), own=4)  # fewer than its own: it is behind
    assert (others.running, others.waiting) == (0, 0)


def test_a_server_that_computes_nothing_for_long_has_no_others():
    """vLLM reports an aborted request until its next step."""
    others = OtherLoad()
    states = []
    for _ in range(12):
        others.observe(reported(1, work=7), own=0)
        states.append(others.running)
    assert states == [0] + [1] * 9 + [0] * 2
    others.observe(reported(1, work=8), own=0)
    others.observe(reported(1, work=9), own=0)
    assert others.running == 1


def test_the_load_of_others_is_part_of_the_status():
    meter = LoadMeter(total_blocks=100)
    meter.others.observe(reported(3, 2, work=1), own=0)
    meter.others.observe(reported(3, 2, work=2), own=0)
    status = meter.status(cached_blocks=0)
    assert (status.running, status.waiting, status.answering) == (3, 2, 3)
    assert (status.answering_context, status.coming_context) == (300, 200)
    assert status.queued_prompt_tokens == 80
    assert status.queued_prompt_context == 2 * sum(range(60, 100))


def stalls_after(
    own: int = 1, running: int = 1, work: float = 0.0, generated: int | None = 5
) -> int:
    """Return the number of equal reports until the server is stalled; 0 if it never is."""
    watch = StallWatch()
    for number in range(60):
        load = reported(running, work=7 + work * number)
        if watch.observe(load, own, generated):
            return number
    return 0


def test_a_server_that_computes_nothing_for_its_responses_is_stalled():
    assert stalls_after() == 8
    assert stalls_after(running=0) == 8, "it has lost them"
    assert stalls_after(work=1.0) == 0, "it computes"
    assert stalls_after(own=1, running=2) == 0, "it may compute a prompt of others"
    assert stalls_after(generated=None) == 0, "it may compute a prompt"
    watch = StallWatch()
    assert not any(watch.observe(reported(1, work=7), 1, tokens) for tokens in range(30))


def test_tokens_are_expected_when_all_prompts_are_computed():
    meter = LoadMeter(total_blocks=100)
    meter.submitted("probe", 0, SequenceProgress(24, 0, 0))
    assert meter.generated is None, "the first prompt of a server may take long"
    meter.ended("probe", 0)
    for name in ("a", "b"):
        meter.submitted(name, 0, SequenceProgress(160, 0, 0))
    meter.tokens("a", 0, 3, 10, 0)
    assert meter.generated is None
    meter.tokens("b", 0, 1, 20, 0)
    assert meter.generated == 4
    meter.submitted("probe", 0, SequenceProgress(24, 0, 0))
    assert meter.generated == 4, "it hides no stall"
    meter.submitted("pulls", 0, SequenceProgress(24, 0, 0, comes=True))
    assert meter.generated is None
    meter.ended("pulls", 0)
    meter.row("a", 0).held = True
    assert meter.generated is None, "another worker takes its KV when it likes"


def test_sequences_that_a_working_server_never_counts_are_missing():
    watch = MissingWatch()
    found = [watch.observe(reported(3, work=step), own=3 + 2) for step in range(10)]
    assert found == [0] * 9 + [2]
    found = [watch.observe(reported(3 + (step == 24), work=step), own=5) for step in range(20, 30)]
    assert found == [0] * 9 + [1], "one of them came for a moment"
    assert watch.observe(reported(5, work=30), own=5) == 0


def test_no_sequence_counts_as_missing_beside_a_queue_or_without_steps():
    """vLLM counts as of its last step, and a prompt may take minutes in one."""
    watch = MissingWatch()
    assert not any(watch.observe(reported(0, work=7), own=1) for _ in range(60))
    assert not any(watch.observe(reported(9, work=step), own=8) for step in range(60))
    assert not any(watch.observe(reported(3, 4, work=step), own=8) for step in range(60))
    several_ranks = [ServerLoad(1, work=step, is_whole=False) for step in range(60)]
    assert not any(watch.observe(load, own=8) for load in several_ranks)


def test_silent_requests_are_those_without_tokens_for_the_longest_time():
    meter = LoadMeter(total_blocks=100)
    for name, submitted_ns in (("early", 10), ("answering", 20), ("late", 90)):
        meter.submitted(name, 0, SequenceProgress(160, 0, submitted_ns))
    meter.submitted("coming", 0, SequenceProgress(160, 0, 5, comes=True))
    meter.submitted("for another worker", 0, SequenceProgress(160, 0, 5, held=True))
    meter.tokens("answering", 0, 1, 60, 0)
    assert meter.silent_since(50) == ["early"]
    assert meter.silent_since(80) == ["early", "answering"]
    assert meter.computed_since(80) == 2
    assert meter.computed_since(100) == 3
