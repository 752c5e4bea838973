"""Special tokens of a Hugging Face directory, which files of its tokenizer name by their text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from baton.model.hf_config import read_json
from baton.model.model_config import ModelConfig

_SUFFIX = "_token"


class _Added(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int]


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_Added] = []
    model: msgspec.Raw = msgspec.Raw(b"{}")


def special_tokens(folder: Path) -> dict[str, str]:
    """Return text by name (``bos_token``) as transformers does; empty for ``null``.

    ``tokenizer_config.json`` takes precedence over ``special_tokens_map.json``.
    """
    special: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, value in read_json(folder / file).items():
            text = _text(value)
            if name.endswith(_SUFFIX) and text is not None:
                special[name] = text
    return special


def _text(value: Any) -> str | None:
    """Return the text of a token in one of its two forms; None for another value."""
    if isinstance(value, dict):
        value = value.get("content", False)
    return (value or "") if isinstance(value, str | None) else None


def with_end(config: ModelConfig, tokenizer: str, end: str) -> ModelConfig:
    """Return the configuration with the token of the text ``end`` among the end tokens.

    ``tokenizer`` is the text of ``tokenizer.json``.
    """
    token_id = _id_of(tokenizer, end) if end else None
    known = config.eos_token_ids
    if token_id is None or token_id in known or not 0 <= token_id < config.vocab_size:
        return config
    return replace(config, eos_token_ids=(*known, token_id))


def _id_of(tokenizer: str, text: str) -> int | None:
    try:  # skips the vocabulary, which is nearly all of the file
        decoded = msgspec.json.decode(tokenizer, type=_Tokenizer)
        for added in decoded.added_tokens:
            if added.content == text:
                return added.id
        return msgspec.json.decode(decoded.model, type=_Model).vocab.get(text)
    except msgspec.DecodeError:  # reading the tokenizer reports it
        return None
