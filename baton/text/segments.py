"""Encoding of long texts in segments between special tokens, with a cache of the segments.

Every turn of a conversation repeats the messages before it, and an agent's tools. Special tokens
separate messages, and no token spans them, so a segment has the same ids in every text. Whether
that is true of a tokenizer is tested with `splits_at_special_tokens`.
"""

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

LONG_CHARACTERS = 8 * 1024
"""Shorter texts are encoded faster than they are split."""
_KEPT_CHARACTERS = 1024  # shorter segments are encoded with their neighbours
_MOST_CHARACTERS = 16 << 20  # in the cache, where a character and its ids take some 5 bytes
_MOST_SEGMENT_CHARACTERS = 1 << 20  # a larger one is not kept
_PROBES = ("", " a", "a ", "\n\nb", "1 234", "é\u0301", "def f():\n    x", "▁", "A'll")

Encode = Callable[[str], list[int]]


def splits_at_special_tokens(encode: Encode, special: Mapping[str, int]) -> bool:
    """Return whether texts around a special token are encoded independently of each other."""
    known = {text: encode(text) for text in _PROBES}
    return bool(special) and all(
        encode(f"{before}{token}{after}") == [*known[before], token_id, *known[after]]
        for token, token_id in special.items()
        for before in _PROBES
        for after in _PROBES[:3]
    )


class SegmentEncoder:
    """Thread-safe encoder of long texts.

    Args:
        encode: Encoder of any text, without added special tokens.
        special: Id by text of every special token.
    """

    def __init__(self, encode: Encode, special: Mapping[str, int]) -> None:
        self._encode = encode
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)))
        self._kept: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._kept_characters = 0
        self._lock = threading.Lock()

    def encode(self, text: str, scope: str) -> list[int]:
        """Return the token ids of ``text``.

        Segments are found again only within a ``scope``: otherwise the time that a text takes would
        show whether another tenant sent it.
        """
        ids: list[int] = []
        begin = 0  # of the text that is not encoded yet
        for start, end in self._long_segments(text):
            ids += self._unkept(text[begin:start])
            ids += self._segment(text[start:end], scope)
            begin = end
        return ids + self._unkept(text[begin:])

    def _long_segments(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each segment that is kept.

        One match at a time: a call that splits the whole text would hold the interpreter.
        """
        start = 0
        for match in self._special.finditer(text):
            if match.start() - start >= _KEPT_CHARACTERS:
                yield start, match.start()
            start = match.end()
        if len(text) - start >= _KEPT_CHARACTERS:
            yield start, len(text)

    def _unkept(self, text: str) -> list[int]:
        return self._encode(text) if text else []

    def _segment(self, segment: str, scope: str) -> "array[int]":
        key = (scope, segment)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
        ids = array("I", self._encode(segment))
        if len(segment) > _MOST_SEGMENT_CHARACTERS:
            return ids
        with self._lock:
            if key not in self._kept:
                self._kept[key] = ids
                self._kept_characters += len(segment)
            while self._kept_characters > _MOST_CHARACTERS:
                (_, oldest), _ = self._kept.popitem(last=False)
                self._kept_characters -= len(oldest)
        return ids
