"""However tokens come, the same text goes out: whole characters, and nothing of a stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.text.detokenizer import Detokenizer, StopMatcher
from baton.text.tokenizer import TextTokenizer
from tests.soak import examples


def push_all(detokenizer: Detokenizer, token_ids) -> str:
    return "".join(map(detokenizer.push, token_ids))


@pytest.fixture(scope="session")
def tokenizer(smollm) -> TextTokenizer:
    return smollm


IDS = st.lists(st.integers(0, 49151), max_size=40)
STOPS = st.lists(st.text("aeio tn", min_size=1, max_size=3), max_size=4)
TEXT = st.text(st.sampled_from(list("ab é北👩\u200d")), max_size=30)


def by_definition(text: str, stops: list[str]) -> str:
    """The text up to the first stop string to be complete; of two, the longer."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - len(max(ended, key=len))]
    return text


@settings(max_examples=examples(300), deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(1, 4), min_size=30, max_size=30),
)
def test_stops_end_the_text_where_they_should_however_it_is_cut(text, stops, cuts):
    matcher, shown, rest = StopMatcher(stops), "", text
    stopped = None
    for cut in cuts:
        piece, rest = rest[:cut], rest[cut:]
        more, stopped = matcher.push(piece)
        shown += more
        if stopped or not rest:
            break
    shown += "" if stopped else matcher.release()
    assert shown == by_definition(text, stops)


@settings(max_examples=examples(200), deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_nothing_more_is_held_than_could_begin_a_stop(text, stops):
    matcher, shown = StopMatcher(stops), ""
    for seen, character in enumerate(text, start=1):
        more, stopped = matcher.push(character)
        if stopped:
            break
        shown += more
        held = text[len(shown) : seen]
        prefixes = {stop[:size] for stop in stops for size in range(1, len(stop))}
        longest = max((p for p in prefixes if text[:seen].endswith(p)), key=len, default="")
        assert held == longest


@settings(max_examples=examples(200), deadline=None)
@given(text=TEXT)
def test_text_that_was_encoded_comes_out_whole_and_never_broken(tokenizer, text):
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + detokenizer.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=examples(200), deadline=None)
@given(ids=IDS)
def test_any_tokens_give_the_text_of_all_at_once(tokenizer, ids):
    detokenizer = Detokenizer(tokenizer)
    text = push_all(detokenizer, ids) + detokenizer.finish()
    # The end may cut a character in half; that one is not shown.
    whole = tokenizer.decode(ids)
    assert whole.startswith(text)
    assert set(whole[len(text) :]) <= {"\ufffd"}


@settings(max_examples=examples(200), deadline=None)
@given(
    ids=IDS, stops=st.lists(st.text("aeio tn", min_size=1, max_size=3), max_size=4), at=st.data()
)
def test_a_replay_continues_as_the_original_would(tokenizer, ids, stops, at):
    cut = at.draw(st.integers(0, len(ids)))
    original = Detokenizer(tokenizer, stops)
    before = push_all(original, ids[:cut])
    replayed = Detokenizer(tokenizer, stops)
    for token_id in ids[:cut]:
        replayed.push(token_id)
    assert (replayed.tokens, replayed.text_length) == (original.tokens, original.text_length)
    after = [push_all(one, ids[cut:]) + one.finish() for one in (original, replayed)]
    assert after[0] == after[1]
    fresh = Detokenizer(tokenizer, stops)
    assert push_all(fresh, ids) + fresh.finish() == before + after[0]
    assert fresh.stopped_by == original.stopped_by


def test_no_stop_counts_within_the_first_tokens(tokenizer):
    ids = tokenizer.encode("one two one two")
    eager = Detokenizer(tokenizer, ["two"])
    assert push_all(eager, ids) == "one "
    patient = Detokenizer(tokenizer, ["two"], min_tokens=2)
    assert push_all(patient, ids) == "one two one "
    assert patient.stopped_by == "two"


def test_special_tokens_are_not_shown(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    assert push_all(detokenizer, [19556, 2, 28]) == "Hello,"
    assert detokenizer.tokens == 3


def test_after_a_stop_nothing_is_shown(tokenizer):
    detokenizer = Detokenizer(tokenizer, ["Hello"])
    assert detokenizer.push(19556) == ""
    assert detokenizer.push(28) == ""
    assert detokenizer.finish() == ""
    assert detokenizer.tokens == 1


def test_what_was_held_is_released_at_the_end(tokenizer):
    detokenizer = Detokenizer(tokenizer, ["Hello, world"])
    assert push_all(detokenizer, tokenizer.encode("Hello, wor")) == ""
    assert detokenizer.finish() == "Hello, wor"
