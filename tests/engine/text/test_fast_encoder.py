"""The fast encoder gives the ids of `tokenizers`, or is not taken in."""

import copy
import json

import fastokens
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from baton.text.fast_encoder import open_fast_encoder
from baton.text.tokenizer import TextTokenizer, byte_alphabet, load_tokenizer
from baton.types.errors import InvalidRequestError

CUTS = ["smollm", "gpt-2", "llama-bpe", "qwen2", "gpt-4o"]
HARD = [
    *(" ", "  ", "\n", "\r\n", "\t", "the", "The", " 12345", "²", "½", "١٢٣", "é", "e\u0301", "ß"),
    *(
        "中文",
        "한국어",
        "\u1100\u1161",
        "😀",
        "👨\u200d👩\u200d👧",
        "\u00a0",
        "\u2028",
        "\x00",
        "\x7f",
        "\ufeff",
    ),
    *("'s", "'S", "'LL", "don't", "<|im_start|>", "<|im_end|>", "_", "...", "!!!", "Ⅻ", "ǅ", "ʰ"),
    *("ｱ", "İ", "ſ", "\u212a", "\U000e0001", "\u0378", "א", "ﷺ", "<bos>", "<start_of_turn>"),
]
texts = st.lists(st.sampled_from(HARD) | st.text(max_size=4), max_size=30).map("".join)


@pytest.fixture(scope="session", params=[*CUTS, pytest.param("gemma", marks=pytest.mark.slow)])
def pair(request, metadata) -> tuple[TextTokenizer, TextTokenizer]:
    """The same tokenizer, slow and fast."""
    source = {**metadata, "tokenizer.ggml.pre": request.param}
    if request.param == "gemma":
        source = request.getfixturevalue("gemma").tokenizer
    slow = load_tokenizer(source)
    fast = copy.copy(slow)
    assert fast.speed_up()
    return slow, fast


@given(text=texts, special=st.booleans())
def test_it_gives_the_same_ids(pair, text, special):
    slow, fast = pair
    ids = slow.encode(text, add_special_tokens=special)
    assert fast.encode(text, add_special_tokens=special) == ids


def test_what_it_refuses_is_asked_of_the_other(metadata):
    source = {**metadata, "tokenizer.ggml.pre": "qwen2"}
    lacking = "x \U00093d6d"  # the vocabulary of SmolLM2 has no token for the byte F2
    tokenizer = load_tokenizer(source)
    fast = open_fast_encoder(tokenizer.backend)
    assert fast is not None
    with pytest.raises(ValueError, match="0xf2"):
        fast.encode(lacking)
    ids = tokenizer.encode(lacking)
    assert ids
    assert tokenizer.speed_up()
    assert tokenizer.encode(lacking) == ids


def test_one_that_gives_other_ids_is_not_taken_in(smollm, monkeypatch):
    described = json.loads(smollm.backend.to_str())
    described["pre_tokenizer"] = None  # words are not cut before they are merged
    other = fastokens.Tokenizer.from_json_str(json.dumps(described))
    monkeypatch.setattr(fastokens.Tokenizer, "from_json_str", lambda text: other)
    assert open_fast_encoder(smollm.backend) is None


def test_a_kind_that_it_does_not_know_stays_with_the_other():
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    words.decoder = decoders.ByteLevel()
    tokenizer = TextTokenizer(words)
    tokenizer.speed_up()
    assert tokenizer.encode("a") == [1]


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_ids_stay_those_of_the_backend_if_added_tokens_depend_on_their_neighbours(flag, smollm):
    backend = load_tokenizer(smollm.backend.to_str()).backend
    backend.add_tokens([AddedToken("hello", normalized=False, **{flag: True})])
    text = "hello world  hello\n" + "x hello hello, xhello 12 " * 800
    tokenizer = load_tokenizer(backend.to_str())
    tokenizer.speed_up()
    assert list(tokenizer.encode_again(text)) == backend.encode(text).ids


def test_a_text_that_the_tokenizer_cannot_read_is_an_error_of_the_request():
    words = Tokenizer(models.WordLevel({"x": 0}, unk_token="none"))
    panics = Tokenizer(models.BPE({c: i for i, c in enumerate(byte_alphabet())}, []))
    panics.pre_tokenizer = pre_tokenizers.ByteLevel()
    panics.add_tokens([AddedToken("x", rstrip=True), AddedToken("  ", lstrip=True)])
    for backend in (words, panics):
        backend.decoder = decoders.ByteLevel()
        tokenizer = load_tokenizer(backend.to_str())
        tokenizer.speed_up()
        with pytest.raises(InvalidRequestError, match="tokenizer cannot read"):
            tokenizer.encode("x   ")
