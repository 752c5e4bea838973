"""Decoding without the host between the steps."""

import pytest

from baton.engine.cuda.decode_graphs import DecodeRow, rows_bucket, splits_bucket
from baton.engine.cuda.decoder import CudaDecoder
from baton.engine.cuda.kernels.attention import Span
from baton.types.params import SamplingParams
from benchmarks.gpu.decode_loop import DecodeLoop
from tests.engine.cuda import tiny

PROMPTS = (tiny.tokens(14, 1), tiny.tokens(5, 2), tiny.tokens(18, 3))
TABLES = ([4, 9], [1], [11, 6])
PARAMS = (
    SamplingParams(max_tokens=4, temperature=0.0),
    SamplingParams(max_tokens=4, temperature=1.3, seed=(1 << 63) + 9),
    SamplingParams(max_tokens=4, temperature=0.6, seed=5),
)


def by_plans(steps: int) -> list[list[int]]:
    """What the other engine answers, one request at a time."""
    answers = []
    for prompt, table, params in zip(PROMPTS, TABLES, PARAMS, strict=True):
        runner = tiny.torch_runner(tiny.config(), "fp32", bytearray(1 << 20))
        text, start = list(prompt), 0
        for _ in range(steps):
            row = tiny.row(0, text, start, len(text), table, params, len(prompt))
            start = len(text)
            text.append(tiny.step(runner, row)[0][0].token)
        answers.append(text[len(prompt) :])
    return answers


def prefilled() -> tuple[CudaDecoder, list[DecodeRow]]:
    decoder = tiny.decoder()
    spans, flat, rows = [], [], []
    for number, (prompt, table, params) in enumerate(zip(PROMPTS, TABLES, PARAMS, strict=True)):
        spans.append(Span(len(flat), 0, len(prompt) - 1, number))
        flat += prompt[:-1]
        rows.append(DecodeRow(prompt[-1], len(prompt) - 1, table, params.temperature, params.seed))
    decoder.forward(decoder.batch(flat, spans, TABLES))
    return decoder, rows


@pytest.mark.slow
def test_steps_launched_ahead_give_the_tokens_of_steps_that_were_waited_for() -> None:
    decoder, rows = prefilled()
    loop = DecodeLoop(decoder, max_blocks=4)
    loop.start(rows)
    for _ in range(3):
        loop.launch()
    found = [loop.read() for _ in range(3)]
    assert [list(answer) for answer in zip(*found, strict=True)] == by_plans(3)


def test_nan_shows_as_a_token_that_does_not_exist_and_only_in_its_row() -> None:
    decoder, rows = prefilled()
    decoder.pool[1, 0, 1, 2] = float("nan")
    loop = DecodeLoop(decoder, max_blocks=4)
    loop.start(rows)
    loop.launch()
    tokens = loop.read()
    assert tokens[1] == -1
    assert [tokens[0], tokens[2]] == [answer[0] for answer in (by_plans(1)[0], by_plans(1)[2])]


def test_a_batch_is_not_replaced_while_steps_of_it_are_unread() -> None:
    decoder = tiny.decoder(tiny.config(layers=1))
    rows = [DecodeRow(5, 3, table) for table in TABLES]
    loop = DecodeLoop(decoder, max_blocks=4)
    loop.start(rows[:1])
    loop.launch()
    with pytest.raises(RuntimeError, match="1 steps have not been read"):
        loop.start(rows)
    with pytest.raises(ValueError, match="a block table has 2 blocks, limit 1"):
        DecodeLoop(decoder, max_blocks=1).start(rows)


def test_a_step_that_has_no_page_is_refused() -> None:
    decoder = tiny.decoder(tiny.config(layers=1))
    loop = DecodeLoop(decoder, max_blocks=4)
    loop.start([DecodeRow(5, 20, [1, 2]), DecodeRow(5, 15, [3])])
    loop.launch()
    with pytest.raises(ValueError, match="position 21 is beyond the sequence's blocks"):
        loop.launch()
    assert len(loop.read()) == 2
    loop.start([DecodeRow(5, 36, [1, 2, 3])])
    with pytest.raises(ValueError, match="beyond the context of 36 tokens"):
        loop.launch()


def test_buckets() -> None:
    assert [rows_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 64, 65, 256)] == [
        1, 2, 4, 4, 8, 8, 16, 64, 96, 256,
    ]  # fmt: skip
    assert [splits_bucket(n) for n in (1, 2, 3, 5, 128)] == [1, 2, 4, 8, 128]
