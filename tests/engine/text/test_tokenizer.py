"""Text to ids and back: golden ids, an independent oracle, and nasty text."""

import json
from itertools import pairwise

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders

from baton.text.tokenizer import TextTokenizer, byte_alphabet, load_tokenizer
from tests.soak import examples

# Ids of HuggingFaceTB/SmolLM2-135M-Instruct.
GOLDEN = [
    ("Hello, world!", [19556, 28, 905, 17]),
    ("The capital of France is", [504, 3575, 282, 4649, 314]),
    ("What is 12345 + 67?", [1780, 314, 216, 33, 34, 35, 36, 37, 1232, 216, 38, 39, 47]),
    ("<|im_start|>user\n", [1, 4093, 198]),
    ("", []),
]


@pytest.mark.parametrize(("text", "ids"), GOLDEN)
def test_golden_ids(smollm, text, ids):
    assert smollm.encode(text) == ids
    assert smollm.decode(ids, skip_special_tokens=False) == text


class Gpt2Oracle:
    """Byte-level BPE as the paper has it: cut into words, merge the lowest rank until none fits."""

    def __init__(self, metadata: dict) -> None:
        self.ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        merges = (tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"])
        self.ranks = {pair: rank for rank, pair in enumerate(merges)}
        self.letters = {byte: letter for letter, byte in byte_alphabet().items()}
        self.words = regex.compile(
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
        )

    def encode(self, text: str) -> list[int]:
        pieces = [part for part in regex.split(r"(\p{N})", text) if part]  # each digit by itself
        return [
            token
            for piece in pieces
            for word in self.words.findall(piece)
            for token in self.merge([self.letters[byte] for byte in word.encode()])
        ]

    def merge(self, parts: list[str]) -> list[int]:
        while len(parts) > 1:
            pairs = [(self.ranks.get(p, 1 << 30), i) for i, p in enumerate(pairwise(parts))]
            rank, i = min(pairs)
            if rank == 1 << 30:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return [self.ids[part] for part in parts]


@pytest.fixture(scope="module")
def oracle(metadata) -> Gpt2Oracle:
    return Gpt2Oracle(metadata)


# Letters, digits, spaces, marks, emoji with joiners, control characters, other planes. The model's
# vocabulary has no token for some bytes that its training text did not have; they are dropped.
LACKING = "\x04\x06\x13\x14\x16\x1d"
TEXT = st.text(
    alphabet=st.one_of(
        st.sampled_from(list("abc XYZ 0129 \n\t'.,!?-_éß北京한국")),
        st.sampled_from(["👩", "\u200d", "👧", "\ufe0f", "\u0301", "\x00", "\u2028", "½", "٣"]),
        st.characters(
            exclude_categories=("Cs",), exclude_characters=LACKING, max_codepoint=0x1FFFF
        ),
    ),
    max_size=40,
)


def test_bytes_that_the_vocabulary_lacks_are_dropped(smollm, oracle):
    lacking = {byte for byte, letter in oracle.letters.items() if letter not in oracle.ids}
    assert {byte for byte in lacking if byte < 0x80} == set(LACKING.encode())
    assert all(byte in (0xC0, 0xC1) or byte > 0xF0 for byte in lacking if byte >= 0x80)
    assert smollm.decode(smollm.encode(f"a{LACKING}b")) == "ab"


@settings(max_examples=examples(300), deadline=None)
@given(text=TEXT)
def test_ids_equal_those_of_an_independent_bpe(smollm, oracle, text):
    assert smollm.encode(text) == oracle.encode(text)


@settings(max_examples=examples(300), deadline=None)
@given(text=TEXT)
def test_text_comes_back_whole(smollm, text):
    assert smollm.decode(smollm.encode(text)) == text


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30))
def test_decoding_equals_the_backend(smollm, ids):
    assert smollm.decode(ids) == smollm.backend.decode(ids, skip_special_tokens=True)


def test_special_tokens_have_no_shown_text_but_a_spelling(smollm):
    assert smollm.shown_bytes(2) == b""
    assert smollm.token_text(2) == "<|im_end|>"
    assert smollm.special_ids == frozenset(range(17))
    assert smollm.token_bytes(10**6) == b""


def test_a_tokenizer_json_gives_the_same(smollm):
    again = load_tokenizer(smollm.backend.to_str())
    assert again.encode("naïve 北京 12") == smollm.encode("naïve 北京 12")
    assert again.decode([19556, 2, 28]) == "Hello,"


def small(pre: str, **more) -> dict:
    """A byte-level vocabulary of single bytes and a few merges."""
    letters = sorted(byte_alphabet())
    tokens = [*letters, "12", "123", "Ġa", "<s>", "<tool>"]
    types = [1] * (len(tokens) - 2) + [3, 4]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["1 2", "12 3", "Ġ a"],
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def spelled(tokenizer: TextTokenizer, text: str, **options) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, **options)]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["123", "123", "12"]),  # a run of digits is one word
        ("smollm", list("12312312")),  # each digit is a word
        ("qwen2", list("12312312")),
        ("llama-bpe", ["123", "123", "12"]),  # up to three digits are a word
        ("gpt-4o", ["123", "123", "12"]),
    ],
)
def test_the_pre_tokenizer_decides_how_digits_are_cut(pre, pieces):
    assert spelled(load_tokenizer(small(pre)), "12312312") == pieces


def test_token_types_decide_what_is_special():
    tokenizer = load_tokenizer(small("gpt-2"))
    assert spelled(tokenizer, "x<s><tool>") == ["x", "<s>", "<tool>"]
    assert tokenizer.decode(tokenizer.encode("x<s><tool>")) == "x<tool>"


def test_bos_and_eos_are_added_only_when_the_file_says_so_and_it_is_asked_for():
    quiet = load_tokenizer(small("gpt-2", bos_token_id=259))
    assert spelled(quiet, "x", add_special_tokens=True) == ["x"]
    loud = load_tokenizer(
        small("gpt-2", bos_token_id=259, add_bos_token=True, eos_token_id=259, add_eos_token=True)
    )
    assert spelled(loud, "x", add_special_tokens=True) == ["<s>", "x", "<s>"]
    assert spelled(loud, "x") == ["x"]


def test_added_tokens_of_a_byte_level_tokenizer_are_shown_as_text():
    backend = load_tokenizer(small("gpt-2")).backend
    backend.add_tokens(["ĠĠx", "é", "  y"])
    tokenizer = load_tokenizer(backend.to_str())
    ids = [backend.token_to_id(text) for text in ("ĠĠx", "é", "  y")]
    assert [tokenizer.token_text(i) for i in ids] == ["  x", "é", "  y"]
    assert backend.decode(ids[::2]) == tokenizer.decode(ids[::2])


STEPS = {
    "bytes": decoders.ByteFallback(),
    "fuse": decoders.Fuse(),
    "level": decoders.ByteLevel(),
    "space": decoders.Replace("▁", " "),
    "other": decoders.Replace("_", " "),
    "strip": decoders.Strip(" ", 1, 0),
    "two": decoders.Strip(" ", 2, 0),
    "never": decoders.Metaspace(prepend_scheme="never"),
    "always": decoders.Metaspace(prepend_scheme="always"),
    "first": decoders.Metaspace(prepend_scheme="first"),
    "ctc": decoders.CTC(),
}
SHOWN = ("space bytes", "space bytes fuse", "space bytes fuse strip", "bytes", "bytes fuse strip")
SHOWN += ("never", "always", "first", "always bytes fuse", "bytes always", "level", "level fuse")
REFUSED = ("other bytes", "space bytes strip", "space bytes strip fuse", "space bytes fuse two")
REFUSED += ("fuse bytes", "always always", "space always", "bytes fuse always", "space ctc", "fuse")


@pytest.mark.parametrize("steps", SHOWN)
def test_texts_are_those_of_the_steps_of_the_decoder(steps):
    backend = load_tokenizer(sentencepiece(add_space_prefix=False)).backend
    backend.decoder = decoders.Sequence([STEPS[step] for step in steps.split()])
    backend.add_tokens([AddedToken("▁▁▁", normalized=False)])
    for pieces in (
        ["▁hello", "▁w", "<0xC3>", "<0xA9>"],
        ["▁▁▁", "o", "▁▁▁"],
        ["▁", "▁w", "<0x20>"],
    ):
        ids = [backend.token_to_id(piece) for piece in pieces]
        assert load_tokenizer(backend.to_str()).decode(ids) == backend.decode(ids)


@pytest.mark.parametrize("steps", REFUSED)
def test_a_decoder_that_changes_texts_otherwise_is_refused(steps):
    backend = load_tokenizer(sentencepiece()).backend
    backend.decoder = decoders.Sequence([STEPS[step] for step in steps.split()])
    with pytest.raises(ValueError, match="decoder"):
        load_tokenizer(backend.to_str())


def test_settings_of_training_do_not_change_prompts():
    backend = load_tokenizer(small("gpt-2")).backend
    right = backend.encode("1234 5678").ids
    backend.enable_truncation(3)
    backend.enable_padding(length=40)
    backend.model.dropout = 0.9
    tokenizer = load_tokenizer(backend.to_str())
    for _ in range(8):
        assert tokenizer.encode("1234 5678") == right


def test_what_is_not_known_is_refused_by_name():
    with pytest.raises(ValueError, match="kimi-k2"):
        load_tokenizer(small("kimi-k2"))
    with pytest.raises(ValueError, match="'bert'"):
        load_tokenizer({**small("gpt-2"), "tokenizer.ggml.model": "bert"})
    with pytest.raises(ValueError, match="token_type"):
        load_tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": []})
    word_piece = json.loads(Tokenizer.from_str(_word_piece()).to_str())
    with pytest.raises(ValueError, match="WordPiece"):
        load_tokenizer(json.dumps(word_piece))


@pytest.mark.parametrize(
    "changes",
    [{"pre": []}, {"tokens": 5}, {"token_type": None}, {"merges": [1]}, {"bos_token_id": [1]}],
    ids=str,
)
def test_metadata_of_the_wrong_type_is_refused(changes):
    with pytest.raises(ValueError, match=r"invalid value of tokenizer\.ggml"):
        load_tokenizer(small(**{"pre": "gpt-2", "add_bos_token": True, **changes}))


def _word_piece() -> str:
    from tokenizers import decoders, models

    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer.to_str()


def sentencepiece(**more) -> dict:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁", "h", "e", "l", "o", "w", "r", "d", "ll", "he", "hell", "hello", "▁hello", "▁w"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))]
    # Longer pieces score as trained ones do: later merges lower.
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + words,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


class TestSentencePiece:
    """The `llama` kind: merges by score, bytes for what is not in the vocabulary."""

    def test_merges_by_score_with_a_space_in_front(self):
        tokenizer = load_tokenizer(sentencepiece())
        pieces = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("hello wo")]
        assert pieces == ["▁hello", "▁w", "o"]
        assert tokenizer.decode(tokenizer.encode("hello wo")) == "hello wo"

    def test_bos_comes_first_unless_the_file_says_no(self):
        tokenizer = load_tokenizer(sentencepiece())
        assert tokenizer.encode("hello", add_special_tokens=True)[0] == 1
        quiet = load_tokenizer(sentencepiece(add_bos_token=False, add_space_prefix=False))
        assert quiet.encode("hello", add_special_tokens=True) == quiet.encode("hello")
        assert quiet.backend.id_to_token(quiet.encode("hello")[0]) == "hello"

    def test_unknown_characters_fall_back_to_bytes(self):
        tokenizer = load_tokenizer(sentencepiece())
        ids = tokenizer.encode("é")
        assert b"".join(map(tokenizer.token_bytes, ids)) == " é".encode()

    def test_spaces_in_added_tokens_are_spaces(self):
        backend = load_tokenizer(sentencepiece()).backend
        backend.add_tokens([AddedToken(text, normalized=False) for text in ("▁▁▁▁", "<0x0A>")])
        backend.add_special_tokens(["<｜end▁of▁text｜>"])
        tokenizer = load_tokenizer(backend.to_str())
        ids = [backend.token_to_id(text) for text in ("o", "▁▁▁▁", "<0x0A>", "h")]
        assert tokenizer.decode(ids) == backend.decode(ids) == "o    \nh"
        special = backend.token_to_id("<｜end▁of▁text｜>")
        assert tokenizer.token_text(special) == "<｜end▁of▁text｜>"

    @settings(deadline=None, max_examples=examples(100))
    @given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=("Cs",))))
    def test_text_comes_back_whole(self, text):
        tokenizer = _shared_sentencepiece()
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


_SHARED: list[TextTokenizer] = []


def _shared_sentencepiece() -> TextTokenizer:
    if not _SHARED:
        _SHARED.append(load_tokenizer(sentencepiece()))
    return _SHARED[0]
