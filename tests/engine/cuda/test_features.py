"""What requests may ask for beside plain tokens: on CUDA as on the CPU, in one batch."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baton.engine.core.plan import PlanRow, SampleSpec, StepPlan
from baton.engine.cpu.runner import CpuRunner
from baton.engine.cuda.runner import CudaRunner
from baton.engine.numerics import same_bits
from baton.engine.sampling.grammars import Grammars
from baton.model.lora_artifact import TARGETS, read_adapter
from baton.types.errors import GrammarError
from baton.types.params import AdapterRef, SampledToken, SamplingParams
from baton.types.prompt_outputs import MEAN, PromptOutputs
from tests.engine.cuda import tiny
from tests.engine.lora_files import write_adapter

C = tiny.config(layers=1)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
SEEDED = SamplingParams(max_tokens=8, temperature=1.1, seed=4)
FILTERED = SamplingParams(max_tokens=8, temperature=0.9, seed=3, top_k=9)
PUNISHED = SamplingParams(max_tokens=8, temperature=0.9, seed=2, repetition_penalty=1.4)
SHAPED = SamplingParams(max_tokens=8, temperature=0.8, seed=5, grammar="sevens")
BROKEN = SamplingParams(max_tokens=8, temperature=0.0, grammar="broken")


class Sevens(Grammars):
    """Allows multiples of seven; "broken" fails."""

    def __init__(self) -> None:
        self.mask_ns = 0

    def masks(self, specs: Sequence[Sequence[SampleSpec]]) -> tuple[list, dict]:
        self.mask_ns = 1
        allowed = np.arange(C.vocab_size) % 7 == 0
        masks = [[allowed if s.params.grammar == "sevens" else None for s in row] for row in specs]
        broken = [i for i, row in enumerate(specs) if row[0].params.grammar == "broken"]
        return masks, {i: GrammarError("too much work") for i in broken}

    def admissible(self, spec: SampleSpec, draft_tokens: Sequence[int]) -> int:
        if spec.params.grammar == "broken":
            raise GrammarError("too much work")
        return sum(token % 7 == 0 for token in draft_tokens)


class Pair:
    """Both runners, fed alike."""

    def __init__(self) -> None:
        size, grammars = tiny.geometry(C, "fp32").pool_bytes, Sevens()
        self.cuda = tiny.cuda_runner(C, "fp32", bytearray(size), grammars)
        self.cpu = tiny.torch_runner(C, "fp32", bytearray(size), grammars)

    def step(self, *rows: PlanRow) -> list[list[int]]:
        def ids(drawn: list[list[SampledToken]]) -> list[list[int]]:
            return [[token.token for token in row] for row in drawn]

        got, wanted = self.cuda.execute(StepPlan(rows)), self.cpu.execute(StepPlan(rows))
        refused = set(self.cpu.refused_rows)
        assert set(self.cuda.refused_rows) == refused
        for index in set(range(len(rows))) - refused:
            assert ids(got)[index] == ids(wanted)[index], index
        return ids(wanted)


def verifying(sequence: int, text: list[int], draft_tokens: list[int], table: list[int],
              params: SamplingParams, prompt: int) -> PlanRow:  # fmt: skip
    known = [*text, *draft_tokens]
    specs = tuple(
        SampleSpec(0, params, known[: len(text) + i], prompt) for i in range(len(draft_tokens) + 1)
    )
    start = len(text) - 1
    return PlanRow(
        sequence_id=sequence,
        tokens=known[start:],
        start=start,
        block_ids=table,
        samples=specs,
        num_draft_tokens=len(draft_tokens),
    )


@pytest.mark.slow
def test_masks_guesses_and_filters_draw_the_tokens_of_the_cpu() -> None:
    pair = Pair()
    params = {1: GREEDY, 2: SEEDED, 3: FILTERED, 4: SHAPED, 5: PUNISHED}
    texts = {i: list(tiny.tokens(6 + i, seed=i)) for i in params}
    prompts = {i: len(text) for i, text in texts.items()}
    tables = {i: [2 * i, 2 * i + 1] for i in params}

    def rows(number: int, count: int) -> PlanRow:
        text = texts[number]
        start = len(text) - count
        return tiny.row(
            number, text, start, len(text), tables[number], params[number], prompts[number]
        )

    first = pair.step(*(rows(i, len(texts[i])) for i in params))
    for i, drawn in zip(params, first, strict=True):
        texts[i] += drawn
    assert texts[4][-1] % 7 == 0
    decoded = pair.step(*(rows(i, 1) for i in params))  # one captured step
    assert decoded[3][0] % 7 == 0
    # what they will draw is known now: one right draft token, then wrong ones
    verified = pair.step(
        *(
            verifying(i, texts[i], [drawn[0], 95, 96], tables[i], params[i], prompts[i])
            for i, drawn in zip(params, decoded, strict=True)
        )
    )
    assert [len(drawn) for drawn in verified] == [2, 2, 2, 2, 2]
    refused = pair.step(tiny.row(9, tiny.tokens(3), 0, 3, [20], BROKEN), rows(1, 1))
    assert refused[1] == decoded[0]
    assert list(pair.cuda.refused_rows) == [0]


def test_what_a_grammar_lets_guesses_be() -> None:
    runner = tiny.cuda_runner(C, "fp32", bytearray(tiny.geometry(C, "fp32").pool_bytes), Sevens())
    specs = [SampleSpec(0, params, [1], 1) for params in (GREEDY, SHAPED, BROKEN)]
    assert [runner.admissible(spec, [7, 8]) for spec in specs] == [2, 1, 0]


@pytest.mark.parametrize("cut", [5, 13])
def test_scores_and_embeddings_are_those_of_the_cpu(cut: int) -> None:
    size, text = tiny.geometry(C, "fp32").pool_bytes, tiny.tokens(14)

    def prompt_outputs(runner: CudaRunner | CpuRunner) -> PromptOutputs:
        found = PromptOutputs(text, 2, MEAN)
        for start, end in ((0, cut), (cut, 14)):
            samples = (SampleSpec(0, GREEDY, text, 14),) if end == 14 else ()
            row = PlanRow(
                sequence_id=1,
                tokens=text[start:end],
                start=start,
                block_ids=[3],
                samples=samples,
                prompt_outputs=found,
            )
            runner.execute(StepPlan((row,)))
        return found

    mine = prompt_outputs(tiny.cuda_runner(C, "fp32", bytearray(size)))
    theirs = prompt_outputs(tiny.torch_runner(C, "fp32", bytearray(size)))
    left, right = mine.scores(), theirs.scores()
    assert left is not None
    assert right is not None
    assert (left.rows, left.ranks, left.top_ids) == (13, right.ranks, right.top_ids)
    for a, b in ((left.logprobs, right.logprobs), (mine.vector(), theirs.vector())):
        np.testing.assert_allclose(np.frombuffer(a, "<f4"), np.frombuffer(b, "<f4"), atol=1e-4)


@pytest.mark.slow
def test_adapters_are_mixed_in_a_batch_as_on_the_cpu(tmp_path: Path) -> None:
    pair = Pair()
    names = []
    for name, targets in (("all", TARGETS), ("some", ("v_proj", "gate_proj", "down_proj"))):
        path = write_adapter(tmp_path / name, C, size=0.6, rank=4, targets=targets)
        ref = AdapterRef(name, read_adapter(path, C, 64).digest.hex(), str(path))
        for store in (pair.cuda.adapters, pair.cpu.adapters):
            store.add(ref, store.prepare(ref))
        names.append(ref.digest)
    text = tiny.tokens(9)

    def rows(start: int, end: int, answers: list[list[int]]) -> list[PlanRow]:
        found = []
        for i, adapter in enumerate(["", *names, names[0]]):
            whole = [*text, *answers[i]]
            plain = tiny.row(i, whole, start, end, [i], SEEDED if i == 3 else GREEDY, 9)
            found.append(replace(plain, adapter=adapter))
        return found

    first = pair.step(*rows(0, 9, [[]] * 4))
    pair.step(*rows(9, 10, first))
    batch = rows(0, 9, [[]] * 4)
    together = pair.cuda.hidden(StepPlan(tuple(batch)))
    for row, mine, theirs in zip(
        batch, together, pair.cpu.hidden(StepPlan(tuple(batch))), strict=True
    ):
        assert (mine - theirs).norm() < 1e-5 * theirs.norm()
        assert same_bits(pair.cuda.hidden(StepPlan((row,)))[0], mine), "alone as in the batch"
        assert same_bits(mine, together[0]) is (row.adapter == ""), "an adapter changes something"
    pair.cuda.adapters.remove(names[0])
    with pytest.raises(KeyError):
        pair.cuda.hidden(StepPlan((batch[1],)))
