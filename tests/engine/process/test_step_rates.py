"""What an engine says of its own speed: a line through its steps, whatever prompts came."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.process.step_rates import StepRates
from baton.types.events import StepDone
from baton.types.geometry import context_tokens


def step(begin: int, end: int, seconds: float) -> StepDone:
    context = context_tokens(begin, end)
    return StepDone(
        prompt_tokens=end - begin, prompt_context=context, duration_ns=round(seconds * 1e9)
    )


def test_context_tokens_are_those_before_each() -> None:
    assert context_tokens(0, 1) == 0
    assert context_tokens(3, 6) == 3 + 4 + 5
    assert context_tokens(7, 7) == 0


def test_the_line_is_found_through_noise() -> None:
    rates, draw = StepRates(), random.Random(1)
    for _ in range(200):
        begin = draw.randrange(0, 100_000)
        count = draw.randrange(512, 8192)
        seconds = 1.6e-4 * count + 2.9e-9 * context_tokens(begin, begin + count)
        rates.add(step(begin, begin + count, seconds * draw.uniform(0.95, 1.05)))
    assert rates.prompt_fit.token_s == pytest.approx(1.6e-4, rel=0.05)
    assert rates.prompt_fit.context_s == pytest.approx(2.9e-9, rel=0.05)


def test_long_contexts_change_the_rate_and_not_the_line() -> None:
    """A router that took the rate for the worker would send its conversations elsewhere."""
    rates = StepRates()
    for begin in (0, 2000, 0, 4000):
        rates.add(step(begin, begin + 1000, 0.2 + 1e-7 * context_tokens(begin, begin + 1000)))
    before, rate = rates.prompt_fit, rates.prefill_tokens_per_s
    for begin in range(50_000, 90_000, 1000):
        rates.add(step(begin, begin + 1000, 0.2 + 1e-7 * context_tokens(begin, begin + 1000)))
    assert rates.prefill_tokens_per_s < rate / 10
    assert rates.prompt_fit == pytest.approx(before, rel=0.1)


def test_prompts_that_are_all_alike_do_not_tell_what_context_costs() -> None:
    rates, draw = StepRates(), random.Random(2)
    assert rates.prompt_fit == (0, 0)
    for _ in range(100):
        rates.add(step(0, draw.randrange(190, 210), draw.uniform(0.05, 0.15)))
    fit = rates.prompt_fit
    assert 200 * fit.token_s + context_tokens(0, 200) * fit.context_s == pytest.approx(0.1, rel=0.1)
    assert 100 * fit.context_s < 0.1 * fit.token_s


def test_short_prompts_do_not_tell_how_fast_long_ones_are() -> None:
    """The fixed time of a step made a worker look half as fast as others."""
    rates = StepRates()
    for _ in range(20):
        rates.add(step(18_000, 18_050, 0.015 + 50 * 2e-4))
    assert rates.prompt_fit == (0, 0)
    assert rates.prefill_tokens_per_s == pytest.approx(2000)
    for _ in range(3):
        rates.add(step(18_000, 18_500, 0.015 + 500 * 2e-4))
    fit = rates.prompt_fit
    assert fit.token_s + 18_250 * fit.context_s == pytest.approx(2.3e-4, rel=0.01)


def test_a_worker_that_became_slower_says_so() -> None:
    rates = StepRates()
    for slower in (1, 4):
        for number in range(200):
            begin = 1000 * (number % 5)
            seconds = (1e-4 + 1e-8 * (begin + 500)) * 1000 * slower
            rates.add(step(begin, begin + 1000, seconds))
    assert rates.prompt_fit.token_s == pytest.approx(4e-4, rel=0.1)
    assert rates.prompt_fit.context_s == pytest.approx(4e-8, rel=0.1)


STEP_S, ROW_S, CONTEXT_S = 0.015, 5e-5, 7e-8


def decode(rows: int, context: int, seconds: float) -> StepDone:
    return StepDone(
        decode_rows=rows, decode_context=context, duration_ns=max(round(seconds * 1e9), 1)
    )


def true_s(rows: float, context: float) -> float:
    return STEP_S + ROW_S * rows + CONTEXT_S * context


def batches(draw: random.Random, steps: int):
    """Rows and contexts of a worker's steps: a few responses come and go between two of them."""
    contexts: list[int] = []
    for number in range(steps):
        if number % 3 == 0:
            wanted = 32 + 24 * math.sin(number / 150)
            if len(contexts) < wanted:
                contexts.append(round(draw.expovariate(1 / 12_000)))
            elif contexts:
                contexts.pop(draw.randrange(len(contexts)))
        contexts = [tokens + 1 for tokens in contexts]
        yield len(contexts), sum(contexts)


def test_decode_steps_are_predicted_by_rows_and_context_through_noise() -> None:
    rates, draw = StepRates(), random.Random(3)
    for rows, context in batches(draw, 2000):
        if rows:
            rates.add(decode(rows, context, true_s(rows, context) * draw.gauss(1, 0.1)))
    for rows, context in [(40, 300_000), (50, 600_000), (60, 900_000), (30, 700_000)]:
        assert predicted_s(rates, rows, context) == pytest.approx(true_s(rows, context), rel=0.05)


def predicted_s(rates: StepRates, rows: float, context: float) -> float:
    fit = rates.decode_fit
    return fit.step_s + fit.row_s * rows + fit.context_s * context


def test_the_median_step_does_not_tell_what_the_next_context_costs() -> None:
    """By the median step alone, a long context would cost no more than a short one."""
    rates, draw = StepRates(), random.Random(4)
    for rows, context in batches(draw, 2000):
        if rows:
            rates.add(decode(rows, context, true_s(rows, context)))
    longer_s = predicted_s(rates, 33, 600_000) - predicted_s(rates, 32, 500_000)
    assert longer_s == pytest.approx(ROW_S + 100_000 * CONTEXT_S, rel=0.05)
    assert longer_s > 5 * 0.023 * rates.decode_step_s


def test_steps_that_are_all_alike_keep_what_is_assumed_of_a_row() -> None:
    rates = StepRates()
    assert rates.decode_fit == (0, 0, 0)
    for _ in range(100):
        rates.add(decode(8, 8000, 0.03))
    assert predicted_s(rates, 8, 8000) == pytest.approx(0.03)
    assert predicted_s(rates, 9, 8000) == pytest.approx(0.03 * (1 + 0.023 * 9) / (1 + 0.023 * 8))
    assert rates.decode_fit.context_s == 0


def test_only_rows_vary() -> None:
    rates = StepRates()
    for number in range(300):
        rows = 1 + number % 32
        rates.add(decode(rows, 0, 0.01 + 0.001 * rows))
    assert rates.decode_fit == pytest.approx((0.01, 0.001, 0), rel=0.05)


def test_only_context_varies() -> None:
    rates = StepRates()
    for number in range(300):
        context = 1000 * (number % 50)
        rates.add(decode(4, context, 0.02 + 1e-7 * context))
    assert predicted_s(rates, 4, 80_000) == pytest.approx(0.028, rel=0.02)


def test_steps_that_were_interrupted_change_little() -> None:
    rates, draw = StepRates(), random.Random(5)
    for number, (rows, context) in enumerate(batches(draw, 2000)):
        if rows:
            pause_s = 2.0 if number % 200 == 199 else 0.0
            rates.add(decode(rows, context, true_s(rows, context) + pause_s))
    assert predicted_s(rates, 40, 500_000) == pytest.approx(true_s(40, 500_000), rel=0.1)


def test_decode_steps_that_became_slower_are_followed() -> None:
    rates, draw = StepRates(), random.Random(6)
    for slower in (1, 2):
        for rows, context in batches(draw, 2000):
            if rows:
                rates.add(decode(rows, context, slower * true_s(rows, context)))
    assert predicted_s(rates, 40, 500_000) == pytest.approx(2 * true_s(40, 500_000), rel=0.05)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 512), st.integers(0, 10**7), st.floats(1e-6, 100, allow_nan=False)
        ),
        min_size=1,
        max_size=60,
    )
)
def test_no_steps_make_a_fit_that_is_negative_or_misses_their_mean(steps) -> None:
    rates = StepRates()
    for rows, context, seconds in steps:
        rates.add(decode(rows, context, seconds))
    fit = rates.decode_fit
    assert all(math.isfinite(part) and part >= 0 for part in fit)
    assert sum(fit) > 0
    longest_s = max(seconds for *_, seconds in steps)
    most = max(rows for rows, *_ in steps), max(context for _, context, _ in steps)
    least = min(rows for rows, *_ in steps), min(context for _, context, _ in steps)
    assert predicted_s(rates, *least) <= longest_s * 1.001
    assert predicted_s(rates, *most) >= 0.999 * min(seconds for *_, seconds in steps)


@given(st.integers(0, 100), st.floats(0, 0.1), st.floats(0, 1e-3), st.floats(0, 1e-6))
def test_any_line_is_found(seed, step_s, row_s, context_s) -> None:
    rates, draw = StepRates(), random.Random(seed)
    for _ in range(200):
        rows = draw.randrange(1, 64)
        context = sum(round(draw.expovariate(1 / 8000)) for _ in range(rows))
        seconds = 1e-3 + step_s + row_s * rows + context_s * context
        rates.add(decode(rows, context, seconds))
    for rows, context in [(10, 50_000), (60, 600_000), (30, 400_000)]:
        true = 1e-3 + step_s + row_s * rows + context_s * context
        assert predicted_s(rates, rows, context) == pytest.approx(true, rel=0.05)
