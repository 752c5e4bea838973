"""Tokens and chat templates of a Hugging Face directory, as transformers reads them.

``tokenizer.json`` has the vocabulary; files beside it add tokens, make tokens special, and name
some of them by their text. ``token_keys.py`` lists the keys.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from baton.model.hf_config import read_json, read_text
from baton.model.hf_keys import refuse_values
from baton.model.model_config import ModelConfig, ModelError
from baton.model.token_keys import HINT, TOKENIZER_CONFIG

_SUFFIX = "_token"
_CLASS = "tokenizer_class"
_PREFIXED = re.compile("(GPT2|Qwen2)Tokenizer")  # classes that read `add_prefix_space`
_NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # get new ids in this order
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False) | {"normalized": True}
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words of Mistral's tokenizers since 2024."""


class _Model(msgspec.Struct):
    vocab: dict[str, int]


class TokenFiles:
    """Files of a directory that are read together.

    Attributes:
        tokenizer: Text of ``tokenizer.json`` with the changes that the other files make.
        special: Text by name (``bos_token``); empty for ``null``.
        templates: Chat templates by name; ``default`` and ``tool_use`` are used.

    Args:
        check: Whether values that are not supported are errors.

    Raises:
        ModelError: A file cannot be read, or a value is not supported.
    """

    def __init__(self, folder: Path, *, check: bool) -> None:
        config = read_json(folder / "tokenizer_config.json")
        if check:
            where = str(folder / "tokenizer_config.json")
            refuse_values(where, config, TOKENIZER_CONFIG, hint=HINT)
        self.templates = _templates(folder, config)
        added = config.get("added_tokens_decoder")
        if added is None:  # of versions before 2023
            config = {**config, **read_json(folder / "special_tokens_map.json")}
            old = read_json(folder / "added_tokens.json").items()
            added = {str(token_id): {"content": text} for text, token_id in old}
        if isinstance(extra := config.get("extra_special_tokens"), dict):
            config = {**config, **extra, "extra_special_tokens": []}
        texts = {name: _text(value) for name, value in config.items() if name.endswith(_SUFFIX)}
        self.special = {name: text for name, text in texts.items() if text is not None}
        if not (file := folder / "tokenizer.json").exists():
            raise ModelError(f"{folder}: tokenizer.json is missing (others are not supported)")
        self.tokenizer, ids = _amended(read_text(file), added, config)
        self._end = ids.get(self.special.get("eos_token", ""), -1)

    def with_end(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration with the tokenizer's end token among the end tokens."""
        known = config.eos_token_ids
        if self._end in known or not 0 <= self._end < config.vocab_size:
            return config
        return replace(config, eos_token_ids=(*known, self._end))


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    given = config.get("chat_template")
    if isinstance(given, list):
        given = {entry["name"]: entry["template"] for entry in given}
    elif not isinstance(given, dict):
        given = {"default": given}
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    files["default"] = folder / "chat_template.jinja"
    texts: dict[str, Any] = {name: read_text(path) for name, path in files.items() if path.exists()}
    given = texts or given
    if given.get("default") is None:  # of models whose processor has the template
        given["default"] = read_json(folder / "chat_template.json").get("chat_template")
    return {name: text for name, text in given.items() if isinstance(text, str)}


def _text(value: Any) -> str | None:
    """Return the text of a token in one of its two forms; None for another value."""
    if isinstance(value, dict):
        value = value.get("content", False)
    return (value or "") if isinstance(value, str | None) else None


def _amended(
    text: str, added: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[str, dict[str, int]]:
    """Return ``tokenizer.json`` with what the other files change, and ids of tokens by text."""
    parts = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    before = msgspec.json.decode(parts.get("added_tokens", b"[]"), type=list[dict[str, Any]])
    tokens = {token["content"]: token for token in before}
    for _, token in sorted(added.items(), key=lambda item: int(item[0])):
        _merge(tokens, token, changes="added_tokens_decoder" in config)
    known = set(tokens)
    usual = {f"{name}{_SUFFIX}": None for name in _NAMED}
    named = [value for name, value in {**usual, **config}.items() if name.endswith(_SUFFIX)]
    others = next((config[name] for name in reversed(_EXTRA) if config.get(name)), ())
    for value in (*named, *others):
        if text_of := _text(value):
            flags = value if isinstance(value, dict) else {}
            flags = {**_FLAGS, "normalized": False, **flags, "content": text_of, "special": True}
            _merge(tokens, flags, changes=text_of not in known)
    for text_of in filter(None, map(_text, named)):
        tokens[text_of] = {**tokens[text_of], "special": True}
    cut = bytes(parts.get("pre_tokenizer", b"null"))
    fixed = cut
    if config.get("add_prefix_space") is True and _PREFIXED.match(str(config.get(_CLASS))):
        fixed = re.sub(rb'("add_prefix_space":\s*)false', rb"\1true", cut)
    if config.get("fix_mistral_regex") is True and cut != b"null":
        fixed = _with_tekken(json.loads(cut))
    parts["pre_tokenizer"] = msgspec.Raw(fixed)
    changed = fixed != cut
    if list(tokens.values()) != before:
        _number(tokens, parts.get("model", b"{}"))
        parts["added_tokens"] = msgspec.Raw(msgspec.json.encode(list(tokens.values())))
        changed = True
    ids = {content: token["id"] for content, token in tokens.items()}
    return msgspec.json.encode(parts).decode() if changed else text, ids


def _merge(
    tokens: dict[str, dict[str, Any]], token: Mapping[str, Any], *, changes: bool = False
) -> None:
    """Add a token, and change one that exists only if it ``changes`` it."""
    flags = {name: token[name] for name in _FLAGS if name in token}
    known = tokens.get(token["content"])
    if known is None or changes:
        base = {"id": -1, "content": token["content"], **_FLAGS} if known is None else known
        special = base["special"] or flags.get("special", False)
        tokens[token["content"]] = {**base, **flags, "special": special}


def _number(tokens: dict[str, dict[str, Any]], model: bytes | msgspec.Raw) -> None:
    """Give new tokens the ids that `tokenizers` will give them."""
    try:
        vocabulary = msgspec.json.decode(model, type=_Model).vocab
    except msgspec.DecodeError:  # a list of pairs
        pairs = json.loads(bytes(model)).get("vocab", ())
        vocabulary = {piece: i for i, (piece, _) in enumerate(pairs)}
    for text, token in tokens.items():
        if token["id"] < 0:
            after = max((other["id"] for other in tokens.values()), default=-1) + 1
            token["id"] = vocabulary.get(text, max(after, len(vocabulary)))


def _with_tekken(cut: dict[str, Any]) -> bytes:
    """Return the pre-tokenizer with the right words of Mistral; early files have others."""
    words = {"pattern": {"Regex": TEKKEN}, "behavior": "Isolated", "invert": False}
    split = {"type": "Split", **words}
    steps = cut["pretokenizers"][1:] if cut["type"] == "Sequence" else [cut]
    return msgspec.json.encode({"type": "Sequence", "pretokenizers": [split, *steps]})
