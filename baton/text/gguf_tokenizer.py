"""Construction of a `tokenizers` object from the metadata of a GGUF file.

The file contains the vocabulary, the merges and two names: ``tokenizer.ggml.model`` (the algorithm)
and ``tokenizer.ggml.pre`` (the splitting into words). ``gguf_words.py`` defines the names. Unknown
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

from baton.model.gguf_tokens import end_texts, token_id
from baton.text.gguf_words import BEGINS, BY_TOKEN, CUTS, DIGIT, GPT2, NFC, WHOLE_WORD_FIRST

_PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """Types of tokens in ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_from_gguf(metadata: Mapping[str, Any], *, encodes: bool = True) -> Tokenizer:
    """Build the tokenizer of ``tokenizer.ggml.*`` metadata.

    Without ``encodes`` it may lack merges, which take a second for 262,144 tokens.

    Raises ``ValueError`` if the algorithm or pre-tokenizer is unknown, or a key is missing.
    """
    fields = {key.removeprefix(_PREFIX): value for key, value in metadata.items()}
    kind = fields.get("model")
    begins = kind == "llama"
    for needed in ("tokens", "token_type"):
        if needed not in fields:
            raise ValueError(f"the GGUF file has no {_PREFIX}{needed}")
    if kind == "gpt2":
        name = _pre_tokenizer(fields)
        tokenizer = _byte_level(fields, name)
        begins = name in BEGINS
    elif kind == "llama":
        tokenizer = _sentencepiece(fields, encodes=encodes)
    else:
        raise ValueError(f"{_PREFIX}model is {kind!r}; supported: 'gpt2', 'llama'")
    _add_tokens(tokenizer, fields, set(end_texts(metadata)))
    _add_ends(tokenizer, metadata, fields, begins)
    return tokenizer


def _pre_tokenizer(fields: Mapping[str, Any]) -> str:
    """Return the name of the pre-tokenizer."""
    name = fields.get("pre", "")
    tokens = fields["tokens"]
    if name in ("", "default"):
        for (token_id, text), known in BY_TOKEN.items():
            if token_id < len(tokens) and tokens[token_id] == text:
                return known
    if name == "":
        raise ValueError(
            f"the GGUF file has no {_PREFIX}pre, without which texts get wrong ids: convert the "
            "model again, or set the key"
        )
    if name not in CUTS:
        raise ValueError(f"{_PREFIX}pre is {name!r}; supported: {', '.join(sorted(CUTS))}")
    return str(name)


def _byte_level(fields: Mapping[str, Any], name: str) -> Tokenizer:
    if "merges" not in fields:
        raise ValueError(f"the GGUF file has no {_PREFIX}merges")
    merges = [tuple(merge.split(" ", 1)) for merge in fields["merges"]]
    vocabulary = {token: i for i, token in enumerate(fields["tokens"])}
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=name in WHOLE_WORD_FIRST)
    except Exception as error:  # `tokenizers` raises no more specific type
        raise ValueError(f"{_PREFIX}merges cannot be used: {error}") from error
    tokenizer = Tokenizer(model)
    cuts = list(CUTS[name])
    by_regex = cuts[-1] == GPT2  # has a fast implementation
    steps: list[Any] = [
        pre_tokenizers.Digits(individual_digits=True)
        if cut == DIGIT
        else pre_tokenizers.Split(Regex(cut), "isolated")
        for cut in cuts[: -1 if by_regex else None]
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_regex))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if name in NFC:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(fields: Mapping[str, Any], *, encodes: bool) -> Tokenizer:
    """Build SentencePiece's BPE: the pair whose union scores highest merges first."""
    tokens = fields["tokens"]
    scores = fields.get("scores")
    if scores is None:
        raise ValueError(f"the GGUF file has no {_PREFIX}scores")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = fields.get("unknown_token_id")
    model = models.BPE(
        vocabulary,
        _merges_by_score(tokens, scores, vocabulary, fields["token_type"]) if encodes else [],
        unk_token=tokens[unknown] if unknown is not None else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    back: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


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


def _add_tokens(tokenizer: Tokenizer, fields: Mapping[str, Any], ends: set[str]) -> None:
    """Add tokens that are matched before words are split. Control tokens are never shown.

    Ends of answers are control tokens, whatever their type, as in llama.cpp.
    """
    special: list[AddedToken] = []
    shown: list[AddedToken] = []
    for token, kind in zip(fields["tokens"], fields["token_type"], strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token in ends:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED:
            shown.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(shown)


def _add_ends(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], fields: Mapping[str, Any], begins: bool
) -> None:
    """Add BOS and EOS; files without the flag need a BOS token if the model ``begins`` with one."""
    bos = token_id(metadata, "bos") if fields.get("add_bos_token", begins) else None
    eos = token_id(metadata, "eos") if fields.get("add_eos_token", False) else None
    ends = [token for token in (bos, eos) if token is not None]
    if not ends:
        return
    if max(ends) >= len(fields["tokens"]):
        raise ValueError(f"token {max(ends)} is outside the vocabulary of {len(fields['tokens'])}")
    named = [(fields["tokens"][token], token) for token in ends]
    template = ["$A"]
    if bos is not None:
        template.insert(0, named[0][0])
    if eos is not None:
        template.append(named[-1][0])
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)
