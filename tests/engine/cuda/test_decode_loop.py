"""Decoding without the host between the steps."""

import dataclasses

import pytest
import torch

from baton.engine.cuda import upload
from baton.engine.cuda.decode_graphs import (
    DecodeRow,
    DecodeSteps,
    Replay,
    items_bucket,
    rows_bucket,
)
from baton.engine.cuda.decoder import CudaDecoder
from baton.engine.cuda.kernels.attention import Span
from baton.engine.numerics import same_bits
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
    assert [items_bucket(n, 8) for n in (3, 8, 16, 17, 32, 33, 1024)] == [
        16, 16, 16, 32, 32, 64, 1024,
    ]  # fmt: skip


class Recorder:
    """Stands in for CUDA graphs: a replay runs what was recorded."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0

    def __call__(self, enqueue: Replay) -> Replay:
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            enqueue()

        return replay


def long_batch() -> tuple[CudaDecoder, list[DecodeRow]]:
    """Rows around a split's end: 15, 16 and 40 tokens, with splits of 16."""
    decoder = tiny.decoder(dataclasses.replace(tiny.config(layers=1), max_context_tokens=64))
    decoder.decode_config = dataclasses.replace(decoder.decode_config, kv_tile=16, split=16)
    tables = ([4, 9], [1, 2], [11, 6, 7])
    lengths = (14, 15, 39)
    spans, flat = [], []
    for number, length in enumerate(lengths):
        spans.append(Span(len(flat), 0, length, number))
        flat += tiny.tokens(length, number)
    decoder.forward(decoder.batch(flat, spans, tables))
    rows = [DecodeRow(5, n, table) for n, table in zip(lengths, tables, strict=True)]
    return decoder, rows


def test_captured_steps_over_items_give_the_tokens_of_single_launches() -> None:
    decoder, rows = long_batch()
    record = Recorder()
    steps = DecodeSteps(decoder, 4, capture=record)
    steps.start(rows)
    tokens = [row.token for row in rows]
    for number in range(4):  # the first two rows get their second split meanwhile
        spans = [Span(i, row.position + number, 1, i) for i, row in enumerate(rows)]
        batch = decoder.batch(tokens, spans, [row.blocks for row in rows])
        expected = decoder.forward(batch)
        steps.step()
        assert same_bits(steps.hidden_RE, expected)
        tokens = steps.sampled_R.tolist()
        assert tokens == decoder.logits(expected).argmax(-1).tolist()
    assert (record.captured, record.replayed) == (1, 4), "5 to 7 items of 4 rows: one bucket"


def test_common_steps_are_captured_at_the_start_and_not_again() -> None:
    decoder, rows = long_batch()
    record = Recorder()
    steps = DecodeSteps(decoder, 4, capture=record)
    said: list[str] = []
    before = decoder.pool.clone()
    assert steps.prepare(5, said.append) == record.captured == 4 * 3, (
        "1, 2, 4, 8 rows of 1, 2, 4 splits"
    )
    assert same_bits(decoder.pool, before), "captures store no KV"
    assert said == [f"capturing decode steps of {rows} rows" for rows in (1, 2, 4, 8)]
    steps.start(rows)
    steps.step()
    assert record.captured == 12
    assert DecodeSteps(decoder, 4).prepare(5, said.append) == 0


def test_inputs_of_a_step_are_one_copy_and_new_blocks_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[int] = []

    def copy(host: torch.Tensor, target: torch.Tensor) -> None:
        copies.append(host.numel())
        target.copy_(host)

    monkeypatch.setattr(upload, "copy", copy)
    decoder, rows = long_batch()
    assert len(copies) == 1, "a prefill of three sequences"
    steps = DecodeSteps(decoder, 4)

    def start(changed: list[DecodeRow]) -> int:
        copies.clear()
        steps.start(changed)
        steps.step()
        return len(copies)

    assert start(rows) == 2, "inputs and block tables"
    later = [dataclasses.replace(row, position=row.position + 1) for row in rows]
    assert start(later) == 1
    grown = [dataclasses.replace(later[0], blocks=[4, 9, 12]), *later[1:]]
    assert start(grown) == 2


def test_a_mixed_step_has_one_copy_for_its_rows_and_one_for_its_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[int] = []

    def copy(host: torch.Tensor, target: torch.Tensor) -> None:
        copies.append(host.numel())
        target.copy_(host)

    c = tiny.config(layers=1)
    runner = tiny.cuda_runner(c, "fp32", bytearray(tiny.geometry(c, "fp32").pool_bytes))
    monkeypatch.setattr(upload, "copy", copy)
    params = SamplingParams(max_tokens=4, temperature=0.7, seed=1, top_k=3)
    rows = (
        tiny.row(1, tiny.tokens(9), 0, 9, [3], params),
        tiny.row(2, tiny.tokens(12), 0, 12, [5], PARAMS[0]),
    )
    tiny.step(runner, *rows)
    assert len(copies) == 2
