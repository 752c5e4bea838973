"""Tokens with a meaning in a GGUF file: its begin, and the ends of texts and turns."""

from collections.abc import Mapping
from typing import Any

_PREFIX = "tokenizer.ggml."
_CONTROL = 3  # type of a token
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
END_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>"),
        *("<end_of_turn>", "<turn|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_utterance>"),
        *("<eos>", "</s>", "[EOS]", "[EOT]", "<EOT>", "_<EOT>", "<｜end▁of▁sentence｜>"),
        *("<|flush|>", "<|calls|>", "<|tool_response>", "[e~["),
        # parts of code files, at which an insertion ends
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|repo_name|>"),
        *("<|fim_repo|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    )
)
"""Texts of tokens that end an answer, whichever type the file gives them (llama.cpp's list)."""
_SENTENCEPIECE = {"bos": 1, "eos": 2}  # of files of its models without the key


def token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """Return the id of the token ``bos``, ``eos`` …; None if the file has none."""
    default = _SENTENCEPIECE.get(name) if metadata.get(f"{_PREFIX}model") == "llama" else None
    known = metadata.get(f"{_PREFIX}{name}_token_id")
    if known is None and default is not None:
        return default if default < len(metadata.get(f"{_PREFIX}tokens", ())) else None
    return None if known is None else int(known)


def end_tokens(metadata: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return the end tokens: those with a key, then those with a known text.

    Few files name the end of a turn, which is seldom the end of a text. Like llama.cpp, find it by
    its text, whatever its type; but ``</s>`` that is no control token is HTML (Gemma).
    """
    named = (token_id(metadata, name) for name in _END_KEYS)
    token_ids = dict.fromkeys(token for token in named if token is not None)
    known = end_texts(metadata, vocab_size)
    return tuple({**token_ids, **dict.fromkeys(known.values())})


def end_texts(metadata: Mapping[str, Any], vocab_size: int | None = None) -> dict[str, int]:
    """Return the id by text of the tokens that end an answer by their text."""
    texts = metadata.get(f"{_PREFIX}tokens", ())
    types = metadata.get(f"{_PREFIX}token_type", ())
    known = {text: i for i, text in enumerate(texts[:vocab_size]) if text in END_TEXTS}
    if "</s>" in known and types and types[known["</s>"]] != _CONTROL:
        del known["</s>"]
    if known.keys() & {"<|call|>", "<|calls|>"} and known.keys() & {"<|return|>", "<|flush|>"}:
        known.pop("<|end|>", None)  # of a channel, behind which the answer continues
    return known
