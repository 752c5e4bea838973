"""Gemma 3's SentencePiece tokenizer, built from GGUF metadata, against an oracle of its own."""

import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.text.gguf_tokenizer import TokenType
from baton.text.tokenizer import TextTokenizer
from tests.soak import examples

PREFIX = "tokenizer.ggml."

# Checked by hand against the vocabulary: digits stand alone, runs of spaces and of line breaks are
# tokens, and what has no token is written in bytes.
GOLDEN = [
    ("The capital of France is", [818, 5279, 529, 7001, 563]),
    ("123", [236770, 236778, 236800]),
    ("  two  spaces\n\n\tx", [138, 13498, 138, 35220, 108, 255968, 236781]),
    ("<start_of_turn>user\n", [105, 2364, 107]),
    ("", []),
]


@pytest.fixture(scope="session")
def metadata(gemma) -> dict:
    return gemma.tokenizer


@pytest.fixture(scope="session")
def tokenizer(gemma_tokenizer) -> TextTokenizer:
    return gemma_tokenizer


@pytest.mark.parametrize(("text", "ids"), GOLDEN)
def test_golden_ids(tokenizer, text, ids):
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_text_begins_with_bos_when_asked(tokenizer):
    assert tokenizer.encode("x", add_special_tokens=True) == [2, 236781]
    assert tokenizer.token_text(2) == "<bos>"


def test_what_has_no_token_is_written_in_bytes(tokenizer, metadata):
    tokens = metadata[f"{PREFIX}tokens"]
    lacking = next(c for c in map(chr, range(0x13000, 0x14000)) if c not in tokens)  # hieroglyphs
    ids = tokenizer.encode(f"a{lacking}")
    assert [tokens[i] for i in ids] == ["a", *(f"<0x{byte:02X}>" for byte in lacking.encode())]
    assert tokenizer.decode(ids) == f"a{lacking}"


class SentencePieceOracle:
    """SentencePiece's BPE as its paper has it: the best-scored union of neighbours, left first."""

    def __init__(self, metadata: dict) -> None:
        tokens = metadata[f"{PREFIX}tokens"]
        kinds = metadata[f"{PREFIX}token_type"]
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.scores = dict(zip(tokens, metadata[f"{PREFIX}scores"], strict=True))
        whole = {TokenType.CONTROL, TokenType.USER_DEFINED}
        self.whole = {t for t, kind in zip(tokens, kinds, strict=True) if kind in whole}
        longest = sorted(self.whole, key=len, reverse=True)
        self.cut = re.compile("|".join(map(re.escape, longest)))

    def encode(self, text: str) -> list[int]:
        return [i for piece in self.pieces(text) for i in self.spell(piece)]

    def pieces(self, text: str) -> Iterator[str]:
        at = 0
        for match in self.cut.finditer(text):
            yield text[at : match.start()]
            yield match[0]
            at = match.end()
        yield text[at:]

    def spell(self, piece: str) -> list[int]:
        if piece in self.whole:
            return [self.ids[piece]]
        parts = list(piece.replace(" ", "▁"))
        while True:
            pairs = [(a + b, i) for i, (a, b) in enumerate(pairwise(parts))]
            known = [(-self.scores[union], i) for union, i in pairs if union in self.ids]
            if not known:
                return [i for part in parts for i in self.ids_of(part)]
            _, i = min(known)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]

    def ids_of(self, part: str) -> list[int]:
        if part in self.ids:
            return [self.ids[part]]
        return [self.ids[f"<0x{byte:02X}>"] for byte in part.encode()]


@pytest.fixture(scope="session")
def oracle(metadata) -> SentencePieceOracle:
    return SentencePieceOracle(metadata)


PARTS = st.sampled_from(
    ["the", "The", " quick", "ing", "  ", "   ", "\n", "\n\n\n", "\t", "é", "ß", "日本語", "мир",
     "<b>", "</b>", "🎉", "👩\u200d👧", "12", "3.14", "_x", "def f(x):", "'s", "▁", "\u0301", "𓂀",
     "<eos>", "<unused7>"]
)  # fmt: skip
TEXT = st.one_of(
    st.lists(PARTS, max_size=12).map("".join),
    st.text(st.characters(exclude_categories=("Cs",), max_codepoint=0x1FFFF), max_size=20),
)


@given(TEXT)
@settings(max_examples=examples(150), deadline=None)
def test_it_equals_the_oracle(tokenizer, oracle, text):
    assert tokenizer.encode(text) == oracle.encode(text)


@given(TEXT)
@settings(max_examples=examples(150), deadline=None)
def test_a_text_comes_back_whole(tokenizer, text):
    ids = tokenizer.encode(text)
    # SentencePiece writes spaces as "▁", so that character itself comes back as a space
    assert tokenizer.decode(ids, skip_special_tokens=False) == text.replace("▁", " ")
