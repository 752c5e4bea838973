"""What an engine says of its own speed: a line through its steps, whatever prompts came."""

import random

import pytest

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


def test_a_worker_that_became_slower_says_so() -> None:
    rates = StepRates()
    for slower in (1, 4):
        for number in range(200):
            begin = 1000 * (number % 5)
            seconds = (1e-4 + 1e-8 * (begin + 500)) * 1000 * slower
            rates.add(step(begin, begin + 1000, seconds))
    assert rates.prompt_fit.token_s == pytest.approx(4e-4, rel=0.1)
    assert rates.prompt_fit.context_s == pytest.approx(4e-8, rel=0.1)
