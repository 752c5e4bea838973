"""Encoding of long texts in segments, with a cache of the segments.

    turn 1   <user> [ a document of 20,000 characters        ] <end>
    turn 2   <user> [ the same ] <end> <assistant> [ … ] <end>
    pieces          [ 8,192 | 8,192 | rest ]

Every turn of a conversation repeats the messages before it, and an agent's tools. Special tokens
separate messages, and no token spans them, so a segment has the same ids in every text. Long
segments are cut between words, where no token of most vocabularies spans, either. Whether that is
true of a tokenizer is tested with `splits_at_special_tokens` and `splits_between_words`.
"""

import re
import string
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

LONG_CHARACTERS = 8 * 1024
"""Shorter texts are encoded faster than they are split."""
_KEPT_CHARACTERS = 1024  # shorter segments are encoded with their neighbours
_MOST_CHARACTERS = 16 << 20  # in the cache, where a character and its ids take some 5 bytes
_MOST_SEGMENT_CHARACTERS = 1 << 20  # a larger one is not kept
_PIECE_CHARACTERS = 8 * 1024  # of a segment that is cut between words
_BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")
_SPACES = " ▁Ġ"  # in vocabularies: as it is, of SentencePiece, of byte-level ones
_NO_LETTERS = frozenset(_SPACES + string.punctuation + string.whitespace + "ĊĉčĪ")
_WORDS = ("the", "I", "don't", "é", "Straße", "мир", "x", "word", "שלום", "TOKEN", "ﬁ", "ñ")
_PROBES = ("", " a", "a ", "\n\nb", "1 234", "é\u0301", "def f():\n    x", "▁", "A'll")

Encode = Callable[[str], list[int]]
EncodeAll = Callable[[Sequence[str]], Sequence["array[int]"]]


def splits_at_special_tokens(encode: Encode, special: Mapping[str, int]) -> bool:
    """Return whether texts around a special token are encoded independently of each other."""
    known = {text: encode(text) for text in _PROBES}
    return bool(special) and all(
        encode(f"{before}{token}{after}") == [*known[before], token_id, *known[after]]
        for token, token_id in special.items()
        for before in _PROBES
        for after in _PROBES[:3]
    )


def splits_between_words(encode: Encode, vocabulary: Iterable[str]) -> bool:
    """Return whether words are encoded independently of each other.

    It is so if no token has a space behind a letter, and a text begins like any other word.
    """
    for token in vocabulary:
        if any(c in _SPACES and b not in _NO_LETTERS for b, c in pairwise(token)):
            return False
    pairs = [(first, f" {second}") for first in _WORDS for second in _WORDS]
    return all(encode(a + b) == [*encode(a), *encode(b)] for a, b in pairs)


def _between_words(text: str, begin: int, end: int) -> int | None:
    """Return the first place between two words, searched in parts, which let other threads run."""
    for part in range(begin, end, _PIECE_CHARACTERS):
        last = min(part + _PIECE_CHARACTERS + 1, end)  # a space and a letter follow the place
        if (found := _BETWEEN_WORDS.search(text, part, last)) is not None:
            return found.start()
    return None


class SegmentEncoder:
    """Thread-safe encoder of long texts.

    Args:
        encode_all: Encoder of any texts, without added special tokens.
        special: Id by text of every special token at which texts may be cut.
        between_words: Whether they may be cut between words, too.
    """

    def __init__(
        self, encode_all: EncodeAll, special: Mapping[str, int], *, between_words: bool = False
    ) -> None:
        self._encode_all = encode_all
        self._between_words = between_words
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._kept: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._kept_characters = 0
        self._lock = threading.Lock()

    def encode(self, text: str, scope: str) -> "array[int]":
        """Return the token ids of ``text``, packed: 60,000 objects would take milliseconds.

        Segments are found again only within a ``scope``: otherwise the time that a text takes would
        show whether another tenant sent it.
        """
        segments = list(self._segments(text))
        known = [self._known((scope, part)) if kept else None for part, kept in segments]
        pairs = list(zip(segments, known, strict=True))
        encoded = iter(self._encode_all([part for (part, _), ids in pairs if ids is None]))
        whole = array("I")
        for (part, is_kept), ids in pairs:
            if ids is None:
                ids = next(encoded)
                if is_kept:
                    self._keep((scope, part), ids)
            whole += ids
        return whole

    def _segments(self, text: str) -> Iterator[tuple[str, bool]]:
        """Yield the parts of ``text``, and whether each is kept."""
        begin = 0
        for start, end in self._long_segments(text):
            if start > begin:
                yield text[begin:start], False
            yield text[start:end], True
            begin = end
        if begin < len(text):
            yield text[begin:], False

    def _long_segments(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each segment that is kept.

        One match at a time: a call that splits the whole text would hold the interpreter.
        """
        start = 0
        for match in self._special.finditer(text):
            yield from self._pieces(text, start, match.start())
            start = match.end()
        yield from self._pieces(text, start, len(text))

    def _pieces(self, text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the pieces that are kept: a longer text has the same first ones."""
        while self._between_words and end - start >= 2 * _PIECE_CHARACTERS:
            cut = _between_words(text, start + _PIECE_CHARACTERS, end)
            if cut is None:
                break
            yield start, cut
            start = cut
        if end - start >= _KEPT_CHARACTERS:
            yield start, end

    def _known(self, key: tuple[str, str]) -> "array[int] | None":
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
            return kept

    def _keep(self, key: tuple[str, str], ids: "array[int]") -> None:
        size = len(key[1])
        if size > _MOST_SEGMENT_CHARACTERS:
            return
        with self._lock:
            if key not in self._kept:
                self._kept[key] = ids
                self._kept_characters += size
            while self._kept_characters > _MOST_CHARACTERS:
                (_, oldest), _ = self._kept.popitem(last=False)
                self._kept_characters -= len(oldest)
