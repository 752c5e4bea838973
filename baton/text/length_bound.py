"""Lower bound of a text's number of tokens, computed without tokenizing.

A token has a limited number of bytes and spaces. So a text that is much too long is rejected at
once, where tokenizing it would take seconds. The bound holds for tokenizers that are known to
neither drop nor rewrite text; for others it is 0.
"""

import re
from dataclasses import dataclass, field
from typing import Self

from baton.text.tokenizer import TextTokenizer

_MOST_BYTES = 4  # of a character
_NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
_SHRINKS = {"": 1, "NFC": 3, "NFKC": 4}  # most bytes of text per tokenized byte
_SPACES_ONLY = 'Replace(pattern=String(" "), content="▁")'
_KEEPING = {"Sequence", "Split", "String", "Regex", "ByteLevel", "Digits", "Metaspace"}
_NAME = re.compile(r"\b([A-Z]\w*)\(")


@dataclass(frozen=True, slots=True)
class LengthBound:
    """Length bound of one tokenizer.

    Attributes:
        longest_bytes: Most bytes of text per token; 0 if unknown.
        most_spaces: Most spaces per token.
        dropped: Bytes that produce no token.
    """

    longest_bytes: int = 0
    most_spaces: int = 0
    dropped: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> Self:
        """Compute the bound from the tokenizer's whole vocabulary, which takes a moment."""
        shrinks = _shrinking(tokenizer)
        if not shrinks:
            return cls()
        pieces = [tokenizer.spell(token_id) for token_id in range(tokenizer.vocab_size)]
        known = {piece[0] for piece in pieces if len(piece) == 1}
        dropped = set(range(256)) - known - _NEVER_IN_UTF8
        if dropped and not tokenizer.byte_level:  # then one token may represent any text
            return cls()
        return cls(
            longest_bytes=shrinks * max(map(len, pieces)),
            most_spaces=max(piece.count(b" ") for piece in pieces),
            dropped=bytes(sorted(dropped)),
        )

    def may_exceed(self, characters: int, limit: int) -> bool:
        """Return whether the bound of a text of so many characters may be above ``limit``."""
        return _MOST_BYTES * characters > limit * (self.most_spaces or self.longest_bytes)

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of ``text``."""
        if not self.longest_bytes:
            return 0
        raw = text.encode("utf-8", "replace")
        if self.dropped:
            raw = raw.translate(None, self.dropped)
        by_bytes = -(-len(raw) // self.longest_bytes)
        by_spaces = -(-raw.count(b" ") // self.most_spaces) if self.most_spaces else 0
        return max(by_bytes, by_spaces)


def _shrinking(tokenizer: TextTokenizer) -> int:
    """Return the most bytes of text per tokenized byte; 0 if unlimited."""
    backend = tokenizer.backend
    if backend.truncation is not None:
        return 0
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return 0
    before = repr(backend.pre_tokenizer)
    if before != "None" and ("Removed" in before or not set(_NAME.findall(before)) <= _KEEPING):
        return 0
    if not (tokenizer.byte_level or getattr(backend.model, "byte_fallback", False)):
        return 0
    normalizer = repr(backend.normalizer)
    if normalizer == "None":
        return 1
    rest = normalizer.replace(_SPACES_ONLY, "")
    names = set(_NAME.findall(rest)) - {"Sequence", "Prepend"}
    return _SHRINKS.get("".join(names), 0) if len(names) <= 1 else 0
