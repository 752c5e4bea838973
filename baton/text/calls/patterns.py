"""Patterns of markup that arrives in pieces.

A pattern is a sequence of fixed texts and free parts. On the text so far it matches, cannot match
any more, or needs more text. Once it matches, further text does not change the match, if the
pattern ends with a fixed text.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import NamedTuple

_MAX_STRING_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class Free:
    """Free part of a pattern.

    Attributes:
        grammar: Lark rule of what a model may write here.
    """

    regex: re.Pattern[str]
    grammar: str = ""
    named: bool = False
    quoted: bool = False


SPACE = Free(re.compile(r"\s{0,256}"), "gap")
NAME = Free(re.compile(r"[\w.:/-]{1,256}"), named=True)
KEY = Free(re.compile(r"[^<>\n]{1,256}"), named=True)
CALL_ID = Free(re.compile(r"\w{1,64}"), "CALL_ID")
OPTIONAL_ID = Free(re.compile(r'(, "id": "\w+")?'), "optional_id")
STRING = Free(re.compile(rf'"(?:[^"\\]|\\.){{0,{_MAX_STRING_CHARACTERS}}}"'), quoted=True)
NAME_STRING = Free(STRING.regex, named=True, quoted=True)

Part = str | Free


class NameMatch(NamedTuple):
    """End of a match, and the name in it; empty if the pattern has none."""

    end: int
    name: str = ""


class Scan(NamedTuple):
    """Result of a pattern on an incomplete text."""

    match: NameMatch | None
    undecided: bool = False


_NO = Scan(None)
_MORE = Scan(None, undecided=True)


class Pattern:
    """Sequence of parts.

    Args:
        keep: Number of characters at the end of the match that are read again.
    """

    def __init__(self, *parts: Part, keep: int = 0) -> None:
        self.parts = parts
        self.keep = keep

    @property
    def has_name(self) -> bool:
        """Return whether the pattern contains the name of a function or parameter."""
        return any(isinstance(part, Free) and part.named for part in self.parts)

    @property
    def marker(self) -> str:
        """Return the fixed text that begins the pattern; empty if it begins with a free part."""
        return self.parts[0] if isinstance(self.parts[0], str) else ""

    def after(self, *parts: Part) -> "Pattern":
        """Return the pattern with further parts before it."""
        return Pattern(*parts, *self.parts, keep=self.keep)

    def scan(self, text: str) -> Scan:
        """Match the pattern at the beginning of ``text``, which may continue."""
        at = 0
        name = ""
        for part in self.parts:
            if isinstance(part, str):
                if not text.startswith(part, at):
                    return _MORE if part.startswith(text[at:]) else _NO
                at += len(part)
                continue
            found = part.regex.match(text, at)
            if found is None:
                return _MORE if _may_begin(part, text, at) else _NO
            at = found.end()
            if part.named:
                name = _unquoted(found[0]) if part.quoted else found[0]
                if not name:
                    return _NO
        return Scan(NameMatch(at - self.keep, name))

    def names_in(self, text: str) -> Iterator[str]:
        """Yield the names of all matches in a text."""
        fixed = Pattern(*dropwhile(lambda part: isinstance(part, Free), self.parts))
        at = text.find(fixed.marker)
        while at >= 0:
            match = fixed.scan(text[at:]).match
            if match is not None:
                yield match.name
            at = text.find(fixed.marker, at + 1)


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:  # such as an unknown escape
        return ""


def _may_begin(part: Free, text: str, at: int) -> bool:
    if at == len(text):
        return True
    return part.quoted and text[at] == '"' and len(text) - at < _MAX_STRING_CHARACTERS


def first_match(patterns: Sequence[Pattern], text: str) -> tuple[int, Scan]:
    """Return the first pattern that matches, by its index, unless an earlier one is undecided."""
    for index, pattern in enumerate(patterns):
        scan = pattern.scan(text)
        if scan.match is not None or scan.undecided:
            return index, scan
    return len(patterns), _NO
