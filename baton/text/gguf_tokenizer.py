"""Construction of a `tokenizers` object from the metadata of a GGUF file.

The file contains the vocabulary, the merges and two names: ``tokenizer.ggml.model`` (the algorithm)
and ``tokenizer.ggml.pre`` (the splitting into words). The tables below define the names. Unknown
names are rejected, because a wrong split silently gives wrong ids.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

_PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """Types of tokens in ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Words of GPT-4 and its descendants; the tail is common, the splitting of digits differs.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_TAIL}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2 = "gpt-2"
_DIGITS = "digits, then gpt-2"
# Meaning of `tokenizer.ggml.pre`: a regular expression, or one of the two names above.
_CUTS: dict[str, str] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "jina-en": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "gpt-4o": _GPT4O,
}
_WHOLE_WORD_FIRST = {"llama-bpe", "llama3", "llama-v3"}  # a word in the vocabulary needs no merges
_NFC = {"qwen2", "deepseek-r1-qwen"}


def build_from_gguf(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """Build the tokenizer of ``tokenizer.ggml.*`` metadata, and whether it prepends a space.

    Raises ``ValueError`` if the algorithm or pre-tokenizer is unknown, or a key is missing.
    """
    fields = {key.removeprefix(_PREFIX): value for key, value in metadata.items()}
    kind = fields.get("model")
    for needed in ("tokens", "token_type"):
        if needed not in fields:
            raise ValueError(f"the GGUF file has no {_PREFIX}{needed}")
    if kind == "gpt2":
        tokenizer = _byte_level(fields)
        space = False
    elif kind == "llama":
        tokenizer, space = _sentencepiece(fields)
    else:
        raise ValueError(f"{_PREFIX}model is {kind!r}; supported: 'gpt2', 'llama'")
    _add_tokens(tokenizer, fields)
    _add_ends(tokenizer, fields)
    return tokenizer, space


def _byte_level(fields: Mapping[str, Any]) -> Tokenizer:
    name = fields.get("pre", "default")
    if name not in _CUTS:
        raise ValueError(f"{_PREFIX}pre is {name!r}; supported: {', '.join(sorted(_CUTS))}")
    cut = _CUTS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["merges"]]
    vocabulary = {token: i for i, token in enumerate(fields["tokens"])}
    model = models.BPE(vocabulary, merges, ignore_merges=name in _WHOLE_WORD_FIRST)
    tokenizer = Tokenizer(model)
    by_regex = cut in (_GPT2, _DIGITS)
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_regex)]
    if cut == _DIGITS:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif not by_regex:
        steps.insert(0, pre_tokenizers.Split(Regex(cut), "isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if name in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(fields: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """Build SentencePiece's BPE: the pair whose union scores highest merges first."""
    tokens = fields["tokens"]
    scores = fields.get("scores")
    if scores is None:
        raise ValueError(f"the GGUF file has no {_PREFIX}scores")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = fields.get("unknown_token_id")
    model = models.BPE(
        vocabulary,
        _merges_by_score(tokens, scores, vocabulary, fields["token_type"]),
        unk_token=tokens[unknown] if unknown is not None else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    space = bool(fields.get("add_space_prefix", True))
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    back: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space:
        steps.insert(0, normalizers.Prepend("▁"))
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer, space


def _merges_by_score(
    tokens: Sequence[str],
    scores: Sequence[float],
    vocabulary: Mapping[str, int],
    types: Sequence[int],
) -> list[tuple[str, str]]:
    """Return the merges that the scores imply: every split of a token, best first."""
    mergeable = {TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED}
    found: list[tuple[float, int, int, str, str]] = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind not in mergeable:
            continue
        for cut in range(1, len(token)):
            left = token[:cut]
            if left in vocabulary and (right := token[cut:]) in vocabulary:
                found.append((-score, vocabulary[left], vocabulary[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_tokens(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> None:
    """Add tokens that are matched before words are split. Control tokens are never shown."""
    special = {TokenType.CONTROL, TokenType.UNKNOWN}
    typed = list(zip(fields["tokens"], fields["token_type"], strict=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, t in typed if t in special]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, t in typed
            if t == TokenType.USER_DEFINED
        ]
    )


def _add_ends(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> None:
    # Files of early SentencePiece models lack the flag and need a BOS token.
    needs_bos = fields.get("add_bos_token", fields["model"] == "llama")
    ends = {
        "bos": fields.get("bos_token_id") if needs_bos else None,
        "eos": fields.get("eos_token_id") if fields.get("add_eos_token", False) else None,
    }
    named = [
        (fields["tokens"][token_id], token_id) for token_id in ends.values() if token_id is not None
    ]
    if not named:
        return
    bos = ends["bos"]
    eos = ends["eos"]
    template = ["$A"]
    if bos is not None:
        template.insert(0, fields["tokens"][bos])
    if eos is not None:
        template.append(fields["tokens"][eos])
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)
