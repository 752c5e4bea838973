"""Streaming conversion of tagged parameters to a JSON object. Pure: no clock, no I/O.

<parameter=city>Rome</parameter></function>  ──▶  {"city": "Rome"}
"""

import json
from collections.abc import Mapping
from typing import Literal, NamedTuple

from baton.text.calls.formats import Parameters
from baton.text.calls.patterns import first_match
from baton.text.calls.values import Kind, as_json, begin_of_json, escaped
from baton.text.detokenizer import StopMatcher

State = Literal["more", "ended", "broken"]


class Read(NamedTuple):
    """Result of reading: new JSON, the text that is left, and whether the call is over.

    A call is ``broken`` if the text left belongs to no parameter; its JSON remains incomplete.
    """

    json: str
    rest: str
    state: State


class ParameterReader:
    """Reader of the parameters of one call."""

    def __init__(self, tags: Parameters, kinds: Mapping[str, Kind]) -> None:
        self._tags = tags
        self._kinds = kinds
        self._count = 0
        self._kind: Kind | None = None  # of the current value
        self._tag = StopMatcher((tags.end_tag,))
        self._held = ""  # a value that is no text, or the line end that may be its last
        self._at_start = True  # of a value

    def read(self, text: str) -> Read:
        """Read from the beginning of ``text``; the text left is to be passed again."""
        return self._between(text) if self._kind is None else self._value(text, self._kind)

    def _between(self, text: str) -> Read:
        index, scan = first_match((self._tags.begin, *self._tags.ends), text)
        if scan.match is None:
            return Read("", text, "more" if scan.undecided else "broken")
        rest = text[scan.match.end :]
        if index:
            return Read(self._closing(), rest, "ended")
        self._kind = self._kinds.get(scan.match.name, "mixed")
        begin = ", " if self._count else "{"
        self._count += 1
        self._at_start = True
        quote = '"' if self._kind == "text" else ""
        return Read(f"{begin}{json.dumps(scan.match.name)}: {quote}", rest, "more")

    def _value(self, text: str, kind: Kind) -> Read:
        whole = self._tag.held + text
        shown, tag = self._tag.push(text)
        rest = "" if tag is None else whole[len(shown) + len(tag) :]
        ended = tag is not None
        if ended:
            self._kind = None
        return Read(self._piece(shown, kind, ended=ended), rest, "more")

    def _piece(self, text: str, kind: Kind, *, ended: bool) -> str:
        """Return the JSON of the next piece of a value."""
        if self._tags.lines and self._at_start and text:
            text = text.removeprefix("\n")
            self._at_start = False
        text = self._held + text
        self._held = ""
        if ended:
            if self._tags.lines:
                text = text.removesuffix("\n")
            return f'{escaped(text)}"' if kind == "text" else as_json(text, kind)
        if kind != "text":
            self._held = text
            return ""
        if self._tags.lines and text.endswith("\n"):
            self._held = "\n"
            text = text[:-1]
        return escaped(text)

    def finish(self, text: str) -> Read:
        """Read the text left at the end of a response, which may end within the call's end."""
        if self._kind is not None:
            value = self._held + self._tag.release()
            is_text = self._kind == "text"
            return Read(
                escaped(value) if is_text else begin_of_json(value, self._kind), "", "broken"
            )
        scans = [end.scan(text) for end in self._tags.ends]
        if any(scan.match is not None for scan in scans):
            return Read(self._closing(), "", "ended")
        may_end = any(scan.undecided for scan in scans)
        return Read("", "" if may_end else text, "broken")

    def _closing(self) -> str:
        return "}" if self._count else "{}"
