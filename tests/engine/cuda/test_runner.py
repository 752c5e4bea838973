"""Plans on CUDA against plans on the CPU, the pool that others see included."""

from itertools import chain

import pytest
import torch

from baton.engine.core.plan import PlanRow, SampleSpec, StepPlan
from baton.engine.cuda.host_pool import HostPool
from baton.engine.cuda.sampler import is_on_device
from baton.types.errors import NumericsError
from baton.types.params import SamplingParams
from tests.engine.cuda import tiny

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
SEEDED = SamplingParams(max_tokens=8, temperature=1.2, seed=77, n=2)
SCORED = SamplingParams(max_tokens=8, temperature=0.9, seed=3, top_k=5, logprobs=2)


def pools(c: tiny.ModelConfig, dtype: str) -> tuple[bytearray, bytearray]:
    size = tiny.geometry(c, dtype).pool_bytes
    return bytearray(size), bytearray(size)


def view(pool: bytearray, c: tiny.ModelConfig) -> torch.Tensor:
    return torch.frombuffer(pool, dtype=torch.float32).view(tiny.geometry(c, "fp32").shape)


def test_a_mixed_batch_draws_the_tokens_of_the_cpu_and_leaves_the_same_kv() -> None:
    c = tiny.config(heads=4, kv_heads=2)
    mine, theirs = pools(c, "fp32")
    cuda, cpu = tiny.cuda_runner(c, "fp32", mine), tiny.torch_runner(c, "fp32", theirs)
    a, b, d = (list(tiny.tokens(n, seed=n)) for n in (21, 34, 5))
    tables = [1, 8], [3, 2, 5], [7]

    def both(plan: StepPlan) -> list[list[int]]:
        got, wanted = cuda.execute(plan, lambda _: None), cpu.execute(plan)
        assert [[s.token for s in drawn] for drawn in got] == [
            [s.token for s in drawn] for drawn in wanted
        ]
        for left, right in zip(chain(*got), chain(*wanted), strict=True):
            assert (left.logprob is None) == (right.logprob is None)
            if left.logprob is not None:
                assert left.logprob == pytest.approx(right.logprob, abs=1e-4)
        return [[s.token for s in drawn] for drawn in got]

    first = both(
        StepPlan(
            (
                tiny.row(1, a, 0, 21, tables[0], GREEDY),
                tiny.row(2, b, 0, 17, tables[1]),
                tiny.row(3, d, 0, 5, tables[2], SCORED),
            )
        )
    )
    a.append(first[0][0])
    d.append(first[2][0])
    second = both(
        StepPlan(
            (
                tiny.row(1, a, 21, 22, tables[0], GREEDY, 21),
                tiny.row(3, d, 5, 6, tables[2], SCORED, 5),
                tiny.row(2, b, 17, 34, tables[1], SEEDED),
            )
        )
    )
    b.append(second[2][0])
    both(StepPlan((tiny.row(2, b, 34, 35, tables[1], GREEDY, 34),)))
    torch.testing.assert_close(view(mine, c), view(theirs, c), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_kv_that_others_wrote_into_the_pool_is_used_also_in_pages_used_before() -> None:
    c = tiny.config()
    mine, theirs = pools(c, "fp32")
    cuda, cpu = tiny.cuda_runner(c, "fp32", mine), tiny.torch_runner(c, "fp32", theirs)
    text, table = tiny.tokens(20), [4, 5]
    tiny.step(cuda, tiny.row(1, tiny.tokens(20, seed=9), 0, 20, table))  # the pages' old content
    tiny.step(cpu, tiny.row(2, text, 0, 19, table))
    view(mine, c)[:, :, table] = view(theirs, c)[:, :, table]  # a hand-off
    last = tiny.row(2, text, 19, 20, table, GREEDY)
    assert cuda.execute(StepPlan((last,), written=(4, 5))) == tiny.step(cpu, last)


def test_blocks_go_to_the_host_once_when_they_are_full_or_published() -> None:
    host, device = torch.zeros(1, 2, 4, 16, 1, 2), torch.ones(1, 2, 4, 16, 1, 2)
    host_pool = HostPool(host, device)

    def after(start: int, count: int, *, ends: bool = False) -> list[int]:
        host.zero_()
        row = PlanRow(sequence_id=1, tokens=[7] * count, start=start, block_ids=[3, 0, 2])
        host_pool.after([row], ends=ends)
        host_pool.wait()
        return host[0].amax((0, 2, 3, 4)).nonzero().ravel().tolist()

    assert after(14, 1) == []
    assert after(15, 1) == [3]
    assert after(16, 1) == []
    assert after(15, 17) == [0, 3]
    assert after(15, 18, ends=True) == [0, 2, 3]
    assert after(32, 1, ends=True) == [2]


def test_only_blocks_that_others_wrote_are_copied_to_the_device() -> None:
    host, device = torch.ones(1, 2, 4, 16, 1, 2), torch.zeros(1, 2, 4, 16, 1, 2)
    host_pool = HostPool(host, device)
    row = PlanRow(sequence_id=1, tokens=[7], start=40, block_ids=[3, 0, 2])
    host_pool.before(StepPlan((row,)))
    assert not device.any()
    host_pool.before(StepPlan((row,), copies=((2, 1),), written=(2,)))
    assert device[0].amax((0, 2, 3, 4)).tolist() == [0, 1, 1, 0], "copies see what arrived"


@pytest.mark.slow
def test_copies_happen_before_anything_else_and_in_both_pools() -> None:
    c = tiny.config()
    mine, theirs = pools(c, "fp32")
    cuda, cpu = tiny.cuda_runner(c, "fp32", mine), tiny.torch_runner(c, "fp32", theirs)
    text = tiny.tokens(25)
    for runner in (cuda, cpu):
        tiny.step(runner, tiny.row(1, text, 0, 24, [4, 5]))
    fork = StepPlan((tiny.row(2, text, 24, 25, [4, 9], GREEDY),), copies=((5, 9),))
    assert cuda.execute(fork, lambda _: None) == cpu.execute(fork)
    torch.testing.assert_close(view(mine, c)[:, :, 9], view(theirs, c)[:, :, 9])


@pytest.mark.slow
def test_nan_is_a_typed_error_for_its_row_and_the_other_goes_on() -> None:
    c = tiny.config()
    mine, _ = pools(c, "fp32")
    runner = tiny.cuda_runner(c, "fp32", mine)
    good = tiny.row(1, tiny.tokens(12, 1), 0, 12, [1], GREEDY)
    expected = tiny.step(runner, good)
    text = tiny.tokens(20, 2)
    tiny.step(runner, tiny.row(2, text, 0, 18, [2, 3]))
    view(mine, c)[1, 0, 2, 3] = float("nan")
    bad = tiny.row(5, text, 18, 20, [2, 3], GREEDY)
    with pytest.raises(NumericsError, match="1 of 2 rows") as caught:
        runner.execute(StepPlan((good, bad), written=(2, 3)))
    assert caught.value.rows == (1,)
    assert not view(mine, c)[:, :, 3, 2:].any(), "what it wrote is zeroed"
    assert tiny.step(runner, good) == expected
    assert runner.rewritten_rows == ()


def test_layers_are_announced_when_their_kv_is_in_the_pool_that_others_see() -> None:
    c = tiny.config()
    mine, _ = pools(c, "fp32")
    runner = tiny.cuda_runner(c, "fp32", mine)
    seen = []
    plan = StepPlan((tiny.row(1, tiny.tokens(16), 0, 16, [6]),))
    written = view(mine, c)[:, :, 6]
    runner.execute(plan, lambda done: seen.append((done, bool(written[done - 1].all()))))
    assert seen == [(1, True), (2, True)]
    assert runner.execute(StepPlan(())) == []


@pytest.mark.parametrize(
    ("change", "here"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"stop_token_ids": (4,), "n": 3}, True),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.1}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"grammar": "x"}, False),
        ({"logprobs": 0}, False),
        ({"logit_bias": ((1, 2.0),)}, False),
        ({"bad_words": ((1, 2),)}, False),
        ({"presence_penalty": 0.5}, False),
        ({"min_tokens": 1}, False),
    ],
)
def test_draws_without_penalties_grammars_and_scores_stay_on_the_device(
    change: dict[str, object], here: bool
) -> None:
    params = SamplingParams(**{"max_tokens": 8, "temperature": 1.0, **change})  # type: ignore[arg-type]
    assert is_on_device(SampleSpec(0, params, [1, 2], 2)) is here


def test_a_batch_that_continues_uploads_only_new_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads: list[int] = []

    def copy(host: torch.Tensor, target: torch.Tensor) -> None:
        uploads.append(host.numel())
        target.copy_(host)

    c = tiny.config(heads=4, kv_heads=2)
    ours, theirs = pools(c, "fp32")
    runner = tiny.cuda_runner(c, "fp32", ours)
    peer = tiny.torch_runner(c, "fp32", theirs)
    answers = {1: list(tiny.tokens(13)), 2: list(tiny.tokens(6, seed=1))}
    tables = {1: [3, 7], 2: [5, 9]}
    sampled = {1: GREEDY, 2: SamplingParams(max_tokens=20, temperature=1.2, seed=77)}

    def step(*sequences: int, start: int | None = None) -> int:
        """Compute the newest tokens; return the uploads."""
        rows = []
        for sequence in sequences:
            tokens = answers[sequence]
            begin = len(tokens) - 1 if start is None else start
            end = len(tokens)
            prompt = 13 if sequence == 1 else 6
            rows.append(
                tiny.row(sequence, tokens, begin, end, tables[sequence], sampled[sequence], prompt)
            )
        uploads.clear()
        got = tiny.step(runner, *rows)
        count = len(uploads)
        assert got == tiny.step(peer, *rows)
        for sequence, (token,) in zip(sequences, got, strict=True):
            answers[sequence].append(token.token)
        return count

    step(1, 2, start=0)
    monkeypatch.setattr("baton.engine.cuda.upload.copy", copy)
    assert step(1, 2) == 2, "inputs and tables"
    assert step(1, 2) == 0
    assert step(1, 2) == 1, "the block that the first sequence has filled goes to the host"
    assert step(1, 2) == 1, "the first sequence has a new block"
    assert step(1, 2) == 0
    assert step(2) == 2, "another batch"
    assert step(2) == 0
    assert step(1, 2) == 1, "all inputs, but the tables are still there"
    answers[2][-1] = (answers[2][-1] + 1) % 97
    assert step(1, 2) == 1, "all inputs: a token was not sampled"
    sampled[2] = SamplingParams(max_tokens=20, temperature=0.0, presence_penalty=0.5)
    answers[2][-1] = (answers[2][-1] + 1) % 97
    step(1, 2)
    assert step(1, 2) >= 1, "the host samples one of them"
