"""Masks are a function of the grammar and the answer, however one comes to ask for them."""

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.core.plan import SampleSpec
from baton.engine.sampling.grammars import GrammarCompileQueue, Grammars
from baton.text.grammar import GrammarCompiler, Vocabulary, translate, vocabulary_of
from baton.text.tokenizer import load_tokenizer
from baton.types.errors import GrammarError
from baton.types.params import SamplingParams
from tests.soak import examples

EOS = 2
PADDED = 49_152 + 32
LIST = translate("json", json.dumps({"type": "array", "items": {"type": "integer"}}))
YES_NO = translate("choice", '["yes", "no"]')
WORST = translate("regex", r"(a|b)*a(a|b){7}|[0-9]{3}")


@pytest.fixture(scope="module")
def tokenizer(artifact):
    return load_tokenizer(artifact.tokenizer)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(lambda: vocabulary_of(tokenizer, PADDED, (EOS,)), PADDED)


def spec(grammar, answer, prompt=(5, 6), seed=1, choice=0, **fields):
    params = SamplingParams(max_tokens=99, grammar=grammar, seed=seed, **fields)
    return SampleSpec(choice, params, [*prompt, *answer], len(prompt))


def test_masks_have_the_length_of_the_logits(grammars, tokenizer):
    mask = grammars.allowed(spec(YES_NO, []))
    assert mask.shape == (PADDED,)
    spelled = {tokenizer.token_text(int(i)) for i in np.flatnonzero(mask)}
    assert spelled == {"y", "ye", "yes", "n", "no"}


def test_a_complete_answer_may_only_end(grammars, tokenizer):
    answer = tokenizer.encode("yes")
    assert np.flatnonzero(grammars.allowed(spec(YES_NO, answer))).tolist() == [EOS]


@pytest.fixture(scope="module")
def expected(tokenizer):
    """Per grammar its answer and the mask after each token of it, each by a state of its own."""
    texts = {LIST: "[12, 345,\n  -6, 7]", WORST: "abbababaabbababba", YES_NO: "yes"}
    one = Grammars(lambda: vocabulary_of(tokenizer, PADDED, (EOS,)), PADDED)
    found = {}
    for grammar, text in texts.items():
        ids = tokenizer.encode(text)
        masks = [
            one.allowed(spec(grammar, ids[:size], choice=size)) for size in range(len(ids) + 1)
        ]
        found[grammar] = (ids, masks)
    return found


@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_any_order_of_questions_gives_the_same_masks(grammars, expected, data):
    for _ in range(data.draw(st.integers(1, 12))):
        grammar = data.draw(st.sampled_from(sorted(expected)))
        ids, masks = expected[grammar]
        size = data.draw(st.integers(0, len(ids)))
        seed, choice = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 1))
        asked = spec(grammar, ids[:size], seed=seed, choice=choice)
        assert np.array_equal(grammars.allowed(asked), masks[size])


def test_two_requests_that_look_alike_do_not_mix(grammars, tokenizer):
    left, right = tokenizer.encode("[1, 2"), tokenizer.encode("[33]")
    for _ in range(3):
        assert not grammars.allowed(spec(LIST, left))[EOS]
        assert grammars.allowed(spec(LIST, right))[EOS]


def test_an_answer_off_the_grammar_ends_only_its_own_row(grammars, tokenizer):
    good, bad = spec(YES_NO, []), spec(YES_NO, tokenizer.encode("perhaps"), seed=9)
    free = SampleSpec(0, SamplingParams(max_tokens=9), [1, 2], 1)
    masks, refused = grammars.masks([[good], [bad], [free]])
    assert masks[0][0] is not None
    assert masks[1:] == [[None], [None]]
    assert list(refused) == [1]
    assert isinstance(refused[1], GrammarError)
    assert grammars.mask_ns > 0
    grammars.masks([[free]])
    assert grammars.mask_ns == 0


def test_a_matcher_that_failed_is_replaced(grammars, tokenizer):
    """It never leaves that state, and limits count what it did for earlier questions too."""
    wanted = spec(YES_NO, tokenizer.encode("ye"), seed=77)
    mask = grammars.allowed(wanted)
    for damage in (EOS, PADDED + 1):
        (kept,) = (state for key, state in grammars._states.items() if key[1] == 77)
        assert not kept.matcher.consume_token(damage)
        assert np.array_equal(grammars.allowed(wanted), mask)
        assert grammars.admissible(wanted, tokenizer.encode("s")) == 1


def test_the_queue_compiles_beside_the_step_loop(grammars):
    queue: GrammarCompileQueue[str] = GrammarCompileQueue(grammars)
    queue.add("good", "one", translate("regex", "[a-f]+"))
    queue.add("bad", "two", "start: missing")
    queue.add("gone", "three", translate("regex", "[g-k]+"))
    assert queue.drop("gone")
    assert not queue.drop("gone")
    found = {}
    limit = time.monotonic() + 10
    while len(queue) and time.monotonic() < limit:
        found |= dict(queue.take())
    assert found["one"] is None
    assert isinstance(found["two"], GrammarError)
    assert set(found) == {"one", "two"}


def test_no_step_compiles_however_many_grammars_are_live(monkeypatch):
    letters = Vocabulary([bytes([i]) for i in range(256)], [0], [0])
    grammars = Grammars(lambda: letters, 256)
    queue: GrammarCompileQueue[str] = GrammarCompileQueue(grammars)
    live = {f"request {i}": translate("regex", f"x{{{i + 1}}}y") for i in range(150)}
    for name, grammar in live.items():
        queue.add(name, name, grammar)
    ready = {}
    while len(ready) < len(live):
        ready |= dict(queue.take())
    assert set(ready.values()) == {None}
    monkeypatch.setattr(GrammarCompiler, "compile", lambda *_: pytest.fail("compiled in a step"))
    for step in (0, 1):
        specs = [[spec(grammar, [ord("x")] * step)] for grammar in live.values()]
        _, refused = grammars.masks(specs)
        assert not refused
    for name in live:
        queue.ended(name)
    assert (len(grammars._held), len(grammars._idle)) == (0, 64)
