"""Promise 1 on the real model: the path never shows in the tokens."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.engine.core.plan import PlanRow, StepPlan
from baton.engine.cpu.decoder import Decoder
from baton.engine.cpu.load import load_model
from baton.engine.cpu.selftest import attention_tiling, fast_tiling, numerics_id, verify_exact
from baton.engine.numerics import NumericsSetupError, same_bits
from baton.model.artifact import resolve_model
from baton.types.errors import NumericsError
from baton.types.params import SamplingParams
from tests.engine.conftest import Driver
from tests.engine.tiny_llama import write_llama

Make = Callable[..., Driver]

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SEEDED = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.95, seed=1234)
VOCAB = 49_152


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(VOCAB) for i in range(length)]


WAYS = [
    pytest.param(SEEDED, "bf16", id="seeded-bf16"),
    pytest.param(GREEDY, "fp32", id="greedy-fp32", marks=pytest.mark.slow),
    pytest.param(GREEDY, "bf16", id="greedy-bf16", marks=pytest.mark.slow),
    pytest.param(SEEDED, "fp32", id="seeded-fp32", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("params", "dtype"), WAYS)
def test_the_same_request_gives_the_same_tokens_whatever_the_path(
    make_driver: Make, dtype: str, params: SamplingParams
) -> None:
    driver = make_driver(dtype)
    prompt = prompt_of(150)
    alone = driver.answer(prompt, params)

    for chunks in ([7, 1, 64], [16] * 9, [149]):
        assert driver.answer(prompt, params, chunks=chunks) == alone, chunks
    assert driver.answer(prompt, params, scattered=True) == alone
    assert driver.answer(prompt, params, scattered=True, chunks=[50, 50]) == alone

    # preempted after 5 tokens: prompt and answer are computed again in one go
    tokens = prompt + alone[:5]
    table = driver.blocks(len(tokens) + 1)
    row = driver.row(tokens, 0, len(tokens), table, prompt=len(prompt), params=params)
    assert driver.step(row)[0][0].token == alone[5]

    # behind a prefix that another request computed, in other chunks
    first, second = driver.blocks(96), driver.blocks(96)
    driver.prefill(prompt, first, [33, 63])
    tokens, start, table = list(prompt), 96, first + second
    drawn = []
    while len(drawn) < 6:
        row = driver.row(tokens, start, len(tokens), table, prompt=len(prompt), params=params)
        start = len(tokens)
        tokens.append(driver.step(row)[0][0].token)
        drawn.append(tokens[-1])
    assert drawn == alone[:6]


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_hidden_states_are_bit_equal_across_chunkings_beyond_512_keys(
    make_driver: Make, dtype: str
) -> None:
    driver = make_driver(dtype)
    tokens = prompt_of(600, seed=3)

    def hidden(cuts: list[int], *, scattered: bool) -> torch.Tensor:
        table = driver.blocks(640, scattered=scattered)
        parts = []
        for start, end in zip([0, *cuts], [*cuts, 600], strict=True):
            plan = StepPlan((driver.row(tokens, start, end, table),))
            parts.append(driver.runner.hidden(plan)[0])
        return torch.cat(parts)

    whole = hidden([], scattered=False)
    assert same_bits(hidden([505, 506, 513], scattered=False), whole)
    assert same_bits(hidden([17, 300, 590, 591, 592, 595], scattered=True), whole)


@pytest.mark.slow
def test_fast_numerics_answer_sensibly(make_driver: Make) -> None:
    exact, fast = make_driver("fp32", "exact"), make_driver("fp32", "fast")
    prompt = prompt_of(70)
    assert fast.answer(prompt, GREEDY) == exact.answer(prompt, GREEDY)


def test_choices_of_one_prompt_differ_and_repeat_by_seed(make_driver: Make) -> None:
    driver = make_driver()
    params = SamplingParams(max_tokens=1, temperature=1.5, seed=9, n=6)
    prompt = prompt_of(40)

    def draw() -> list[int]:
        row = driver.row(prompt, 0, 40, driver.blocks(40), prompt=40, params=params)
        return [sampled.token for sampled in driver.step(row)[0]]

    first = draw()
    assert len(set(first)) > 1
    assert draw() == first


def test_copies_happen_before_anything_else(make_driver: Make) -> None:
    driver = make_driver()
    prompt = prompt_of(24)
    table = driver.blocks(32)
    driver.step(driver.row(prompt, 0, 24, table))
    copy = driver.blocks(16)
    tokens = [*prompt, 77]
    original = driver.runner.hidden(StepPlan((driver.row(tokens, 24, 25, table),)))[0].clone()
    branch = driver.row(tokens, 24, 25, [table[0], copy[0]], prompt=24, params=GREEDY)
    driver.runner.execute(StepPlan((branch,), copies=((table[1], copy[0]),)))
    again = driver.runner.hidden(StepPlan((branch,)))[0]
    assert same_bits(again, original)


def test_layers_are_announced_as_their_kv_is_written(make_driver: Make) -> None:
    driver = make_driver()
    prompt = prompt_of(16)
    table = driver.blocks(16)
    pool = driver.runner._pool
    seen = []

    def announce(done: int) -> None:
        written = [bool(pool[layer, :, table[0]].any()) for layer in (done - 1, min(done, 29))]
        seen.append((done, written[0], done < 30 and written[1]))

    driver.runner.execute(StepPlan((driver.row(prompt, 0, 16, table),)), announce)
    assert seen == [(done, True, False) for done in range(1, 31)]


def test_nan_is_a_typed_error_for_its_row_and_does_not_touch_the_neighbour(
    make_driver: Make,
) -> None:
    driver = make_driver()
    good, bad = prompt_of(20, seed=1), prompt_of(36, seed=2)
    good_table, bad_table = driver.blocks(32), driver.blocks(48)  # neighbours in the pool
    driver.step(driver.row(bad, 0, 32, bad_table))
    good_row = driver.row(good, 0, 20, good_table, prompt=20, params=GREEDY)
    bad_row = driver.row(bad, 32, 36, bad_table, prompt=36, params=GREEDY)
    expected = driver.step(good_row)
    # damage from outside: one key of the bad sequence is NaN
    driver.runner._pool[4, 0, bad_table[1], 3, 0, 5] = float("nan")
    with pytest.raises(NumericsError) as caught:
        driver.step(good_row, bad_row)
    assert caught.value.rows == (1,)
    assert not driver.runner._pool[:, :, bad_table[2]].isnan().any()
    assert driver.runner.rewritten_rows[-1] == 1, "what was announced of it is not to be trusted"
    assert driver.step(good_row) == expected


def test_infinite_logits_are_a_typed_error(
    make_driver: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make_driver()
    prompt = prompt_of(8)
    row = driver.row(prompt, 0, 8, driver.blocks(16), prompt=8, params=GREEDY)
    norm = driver.runner._model._final_norm
    monkeypatch.setattr(driver.runner._model, "_final_norm", norm * 1e38)
    with pytest.raises(NumericsError) as caught:
        driver.step(row)
    assert caught.value.rows == (0,)


def test_the_thread_count_shows_in_the_bits_only_if_it_shows_in_the_numerics_id(
    make_driver: Make, load: Callable[[str, str], Decoder]
) -> None:
    driver = make_driver()
    prompt = prompt_of(90)
    table = driver.blocks(96)
    found = {}
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            tiling = driver.runner._attention.tiling
            identity = numerics_id(load("bf16", "exact"), tiling, "bf16", "exact")
            hidden = driver.runner.hidden(StepPlan((driver.row(prompt, 0, 90, table),)))[0]
            found[threads] = identity, hidden
    finally:
        torch.set_num_threads(1)
    assert (found[1][0] == found[2][0]) == same_bits(found[1][1], found[2][1])


def test_stale_values_beyond_the_end_never_leak(make_driver: Make) -> None:
    clean, stale = make_driver(), make_driver()
    stale.runner._pool.fill_(50.0)
    prompt = prompt_of(37)
    assert clean.answer(prompt, GREEDY) == stale.answer(prompt, GREEDY)
    assert clean.answer(prompt, GREEDY) == stale.answer(prompt, GREEDY, scattered=True)


@pytest.mark.usefixtures("key_counting_kernel")
def test_the_self_test_fails_loudly_when_the_machine_does_not_keep_the_promise(
    tmp_path: Path,
) -> None:
    tiny = resolve_model(write_llama(tmp_path))
    broken = fast_tiling(4)  # lengths by the block: not invariant
    with torch.inference_mode():
        model = load_model(tiny, "fp32", "exact")
        verify_exact(model, attention_tiling(tiny.config, "fp32", "exact"), "fp32")
        with pytest.raises(NumericsSetupError, match="computed apart differ"):
            verify_exact(model, broken, "fp32")


def test_the_numerics_id_tells_modes_apart_and_is_stable(
    make_driver: Make, load: Callable[[str, str], Decoder]
) -> None:
    tiling = make_driver().runner._attention.tiling
    model = load("bf16", "exact")
    identity = numerics_id(model, tiling, "bf16", "exact")
    assert identity == numerics_id(model, tiling, "bf16", "exact")
    assert identity.startswith("exact/bf16/")
    assert identity != numerics_id(load("bf16", "fast"), fast_tiling(3), "bf16", "fast")


def test_an_empty_plan_is_no_work(make_driver: Make) -> None:
    assert make_driver().runner.execute(StepPlan(())) == []


def test_results_stand_in_the_order_of_the_plan(make_driver: Make) -> None:
    driver = make_driver()
    long, short = prompt_of(30, seed=5), prompt_of(17, seed=6)
    tables = [driver.blocks(48), driver.blocks(32)]
    alone = [
        driver.step(driver.row(p, 0, len(p), t, prompt=len(p), params=GREEDY))[0]
        for p, t in zip((long, short), tables, strict=True)
    ]
    rows: list[PlanRow] = [
        driver.row(long, 0, 30, tables[0], prompt=30, params=GREEDY),
        driver.row(short, 16, 17, tables[1], prompt=17, params=GREEDY),
    ]
    assert driver.step(*rows) == alone
    assert driver.step(*rows[::-1]) == alone[::-1]
