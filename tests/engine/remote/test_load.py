"""Steps and load of vLLM, from the arrival of tokens."""

from baton.engine.process.step_rates import StepRates
from baton.engine.remote.load import SETTLED_NS, LoadMeter, SequenceProgress

MS = 1_000_000


def test_tokens_of_one_step_arrive_together_and_a_second_one_ends_it() -> None:
    meter = LoadMeter(total_blocks=100)
    for choice in (0, 1):
        meter.submitted("r", choice, SequenceProgress(160, 0, 0))
    assert meter.tokens("r", 0, 1, 100 * MS, 0) is None
    assert meter.tokens("r", 1, 1, 101 * MS, 0) is None
    first = meter.tokens("r", 0, 1, 120 * MS, 0)
    assert first is not None
    assert (first.prompt_tokens, first.decode_rows) == (320, 0)
    assert first.duration_ns == 101 * MS
    meter.tokens("r", 1, 1, 121 * MS, 0)
    second = meter.tokens("r", 0, 1, 140 * MS, 0)
    assert second is not None
    assert (second.prompt_tokens, second.decode_rows) == (0, 2)
    assert second.duration_ns == 20 * MS
    assert second.decode_context == 324
    assert second.step == 2


def test_a_step_without_a_successor_ends_by_itself() -> None:
    meter = LoadMeter(total_blocks=100)
    meter.submitted("r", 0, SequenceProgress(32, 0, 0))
    meter.tokens("r", 0, 1, 50 * MS, 0)
    assert meter.settled(50 * MS + SETTLED_NS - 1, 0) is None
    assert meter.settled(50 * MS + SETTLED_NS, 0) is not None
    assert meter.settled(50 * MS + 2 * SETTLED_NS, 0) is None


def test_a_prompt_counts_without_its_cached_tokens() -> None:
    meter = LoadMeter(total_blocks=100)
    meter.submitted("r", 0, SequenceProgress(160, 128, 10 * MS))
    waiting = meter.status(0)
    assert (waiting.queued_prompt_tokens, waiting.answering) == (32, 0)
    assert waiting.queued_prompt_context == sum(range(128, 160))
    meter.tokens("r", 0, 1, 42 * MS, 0)
    step = meter.settled(42 * MS + SETTLED_NS, 0)
    assert step is not None
    assert (step.prompt_tokens, step.duration_ns) == (32, 0), "the engine has not counted them"
    measured = meter.counted("r", 0, 128, 0)
    assert measured is not None
    assert (measured.prompt_tokens, measured.duration_ns) == (32, 32 * MS)
    row = meter.ended("r", 0)
    assert row is not None
    assert row.input_ns == 32 * MS


def test_tokens_that_were_evicted_while_a_prompt_waited_make_no_engine_look_slow() -> None:
    """It looked half as fast, and stood idle while prompts queued at others."""
    meter = LoadMeter(total_blocks=1000)
    rates = StepRates()
    for number, actual in enumerate((0, 960, None)):
        name = f"{number}"
        submitted_ns = number * 10_000 * MS
        meter.submitted(name, 0, SequenceProgress(1600, 960, submitted_ns))
        computed = 1600 - (960 if actual is None else actual)
        meter.tokens(name, 0, 1, submitted_ns + computed * MS, 0)
        step = meter.end_step(0)
        assert not step.duration_ns
        rates.add(step)
        measured = meter.counted(name, 0, actual, 0)
        assert measured is not None
        rates.add(measured)
        meter.ended(name, 0)
    assert abs(rates.prefill_tokens_per_s - 1000) < 1


def test_prompts_of_one_step_are_measured_when_all_are_counted() -> None:
    meter = LoadMeter(total_blocks=1000)
    for name in ("a", "b", "c"):
        meter.submitted(name, 0, SequenceProgress(320, 160 * (name != "c"), 0))
        meter.tokens(name, 0, 1, 800 * MS, 0)
    assert not meter.end_step(0).duration_ns
    assert meter.counted("a", 0, 0, 0) is None
    assert meter.counted("c", 0, 0, 0) is None
    measured = meter.counted("b", 0, 160, 0)
    assert measured is not None
    assert (measured.prompt_tokens, measured.duration_ns) == (800, 800 * MS)
    meter.submitted("cut", 0, SequenceProgress(320, 160, 900 * MS))
    meter.tokens("cut", 0, 1, 1000 * MS, 0)
    meter.end_step(0)
    meter.ended("cut", 0)
    assert not meter._uncounted
    meter.submitted("cut", 0, SequenceProgress(320, 160, 1100 * MS))
    meter.tokens("cut", 0, 1, 1200 * MS, 0)
    meter.ended("cut", 0)
    assert meter.end_step(0).duration_ns
    assert not meter._uncounted


def test_a_prompt_of_several_steps_is_timed_from_its_first_one() -> None:
    """Also if its token arrives before those of the other sequences in its last step."""
    meter = LoadMeter(total_blocks=1000)
    meter.submitted("a", 0, SequenceProgress(32, 0, 0))
    meter.tokens("a", 0, 1, 10 * MS, 0)
    meter.submitted("b", 0, SequenceProgress(400, 0, 15 * MS))
    for arrival in (20, 120, 220, 320):  # of which the last three have parts of the prompt
        meter.tokens("a", 0, 1, arrival * MS, 0)
    assert meter.tokens("b", 0, 1, 420 * MS, 0) is None
    step = meter.tokens("a", 0, 1, 421 * MS, 0)
    assert step is not None
    assert (step.prompt_tokens, step.decode_rows) == (400, 1)
    assert step.duration_ns == 400 * MS, "from the end of the step in which it was submitted"


def test_prompts_that_wait_for_each_other_are_not_timed_twice() -> None:
    meter = LoadMeter(total_blocks=1000)
    for request in ("a", "b"):
        meter.submitted(request, 0, SequenceProgress(100, 0, 0))
    meter.tokens("a", 0, 1, 100 * MS, 0)
    first = meter.settled(100 * MS + SETTLED_NS, 0)
    meter.tokens("b", 0, 1, 200 * MS, 0)
    second = meter.settled(200 * MS + SETTLED_NS, 0)
    assert first is not None
    assert second is not None
    assert (first.duration_ns, second.duration_ns) == (100 * MS, 100 * MS)


def test_prompts_that_waited_through_the_same_step_are_not_timed_twice() -> None:
    meter = LoadMeter(total_blocks=1000)
    meter.submitted("c", 0, SequenceProgress(1, 0, 0))
    meter.tokens("c", 0, 1, 10 * MS, 0)
    meter.end_step(0)
    for request in ("a", "b"):
        meter.submitted(request, 0, SequenceProgress(100, 0, 20 * MS))
    durations_ms = []
    for request, now_ms in (("c", 50), ("a", 100), ("b", 200)):
        meter.tokens(request, 0, 1, now_ms * MS, 0)
        durations_ms.append(meter.end_step(0).duration_ns // MS)
    assert durations_ms[1:] == [50, 100]


def test_the_rates_that_routers_use_come_out() -> None:
    meter = LoadMeter(total_blocks=1000)
    rates = StepRates()
    now_ns = 0
    for request in map(str, range(5)):
        meter.submitted(request, 0, SequenceProgress(500, 0, now_ns))
        now_ns += 500 * MS  # a token of a prompt takes 1 ms
        for _ in range(20):
            if (step := meter.tokens(request, 0, 1, now_ns, 0)) is not None:
                rates.add(step)
            now_ns += 25 * MS  # a step of a response takes 25 ms
        rates.add(meter.end_step(0))
        meter.ended(request, 0)
    assert abs(rates.prefill_tokens_per_s - 1000) < 1
    assert abs(rates.decode_step_s - 0.025) < 1e-6


def test_the_blocks_add_up() -> None:
    meter = LoadMeter(total_blocks=20)
    meter.submitted("r", 0, SequenceProgress(160, 0, 0))
    for cached_blocks in (0, 5, 15, 30):
        blocks = meter.status(cached_blocks).blocks
        assert blocks.free + blocks.cached + blocks.in_use == blocks.total == 20
        assert blocks.in_use == 10


def test_a_prompt_that_comes_from_another_worker_is_not_computed() -> None:
    """The time in which its KV is loaded is neither that of a prompt nor that of a step."""
    meter = LoadMeter(total_blocks=100)
    meter.submitted("r", 0, SequenceProgress(160, 32, 0, comes=True))
    waiting = meter.status(0)
    assert (waiting.queued_prompt_tokens, waiting.coming_context) == (0, 160)
    assert meter.tokens("r", 0, 1, 900 * MS, 0) is None
    assert meter.settled(2000 * MS, 0) is None
    assert meter.status(0).answering == 1
    meter.tokens("r", 0, 1, 920 * MS, 0)
    step = meter.tokens("r", 0, 1, 945 * MS, 0)
    assert step is not None
    assert (step.prompt_tokens, step.decode_rows) == (0, 1)
    assert step.duration_ns == 20 * MS


def test_a_held_prompt_keeps_its_blocks_and_is_no_response() -> None:
    meter = LoadMeter(total_blocks=100)
    meter.submitted("r", 0, SequenceProgress(160, 0, 0))
    meter.tokens("r", 0, 1, 80 * MS, 0)
    assert meter.input_ns("r", 0) == 80 * MS
    meter.row("r", 0).held = True
    status = meter.status(0)
    assert (status.running, status.answering, status.waiting) == (0, 0, 0)
    assert status.blocks.in_use == 11
    meter.settled(200 * MS, 0)
    assert meter.input_ns("r", 0) == 80 * MS


def test_blocks_that_waiting_prompts_share_are_computed_once() -> None:
    """Eight siblings looked like eight whole prompts, and the engine like eight times as fast."""
    meter = LoadMeter(total_blocks=1000)
    shared = [bytes([1, number]) for number in range(20)]
    for number in range(8):
        own = [bytes([2 + number, block]) for block in range(4)]
        meter.submitted(f"{number}", 0, SequenceProgress(24 * 16, 0, 0, hashes=[*shared, *own]))
    assert meter.status(0).queued_prompt_tokens == 20 * 16 + 8 * 4 * 16
    for number in range(8):
        meter.tokens(f"{number}", 0, 1, 100 * MS, 0)
    step = meter.settled(100 * MS + SETTLED_NS, 0)
    assert step is not None
    assert step.prompt_tokens == 20 * 16 + 8 * 4 * 16
    meter.submitted("later", 0, SequenceProgress(24 * 16, 0, 0, hashes=shared))
    assert meter.status(0).queued_prompt_tokens == 24 * 16, "no prompt waits that has them"
