"""Streaming separation of a response that consists of messages in channels (gpt-oss). Sans-IO.

    <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Paris
                                   ▲                                                     ▲
                               thinking                                               content

Messages of the channel ``analysis`` are thinking. A message to a function is a call: it is output
as content behind a header of one form, which ``baton/text/tool_calls.py`` parses. All other
messages are content, and so is a header that is too long. The output does not depend on how the
text is split into pieces.
"""

import re
from typing import Literal

from baton.text.calls.formats import CHANNEL_CALL
from baton.text.detokenizer import StopMatcher
from baton.text.reasoning import ReasoningParser, Thinking

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_CONSTRAIN = "<|constrain|>"
_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([\w.:/-]+)")
_ONLY_HEADER = re.compile(r"\s*(assistant)?\s*(<\|channel\|>\w*\s*)?")
_RECIPIENT = "to="
_MAX_HEADER_CHARACTERS = 256

_Part = Literal["thinking", "call", "content"]


class ChannelParser:
    """Parser of one response."""

    def __init__(self, thinking: Thinking) -> None:
        self._tags = StopMatcher((_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS))
        self._part: _Part | None = "thinking" if thinking.begun else None  # None: in a header
        self._header = ""
        self._first = not thinking.begun  # the response has no tag and no text so far
        self._spoke: set[_Part] = set()  # parts with text in an earlier message
        self._fresh = False  # the current message has no text so far
        self._thoughts: list[str] = []
        self._content: list[str] = []

    @property
    def thinking(self) -> bool:
        """Return whether the next text is thinking, as far as known."""
        if self._part is None:
            return "analysis" in self._header
        return self._part == "thinking"

    def push(self, text: str) -> tuple[str, str]:
        """Add text; return thinking and content that are certain now."""
        while text:
            whole = self._tags.held + text
            shown, tag = self._tags.push(text)
            self._add(shown)
            if tag is None:
                break
            self._take(tag)
            text = whole[len(shown) + len(tag) :]
        return self._taken()

    def finish(self) -> tuple[str, str]:
        """Return held thinking and content at the end of the text."""
        self._add(self._tags.release())
        self._leave_header()
        return self._taken()

    def _leave_header(self) -> None:
        """Drop a header without a message; other text in its place is content."""
        if not _ONLY_HEADER.fullmatch(self._header):
            self._show_header()
            self._part = None
        self._header = ""

    def _show_header(self) -> None:
        """Output the text in place of a header as the begin of content."""
        self._part = "content"
        self._write(self._header)
        self._header = ""

    def _taken(self) -> tuple[str, str]:
        thoughts = "".join(self._thoughts)
        content = "".join(self._content)
        self._thoughts = []
        self._content = []
        return thoughts, content

    def _add(self, text: str) -> None:
        if not text:
            return
        if self._part is not None:
            self._write(text)
            return
        self._extend_header(text)
        if self._part is None and self._first and not _may_be_header(self._header):
            # The prompt ends within a message, which the response continues.
            self._show_header()

    def _extend_header(self, text: str) -> None:
        self._header += text
        if len(self._header) > _MAX_HEADER_CHARACTERS:
            self._show_header()

    def _take(self, tag: str) -> None:
        self._first = False
        if tag == _MESSAGE and self._part is None:
            self._begin_message(self._header)
            self._header = ""
        elif self._part is None:
            if tag in (_CHANNEL, _CONSTRAIN):
                self._extend_header(tag)
            else:
                self._leave_header()
        elif tag in (_MESSAGE, _CONSTRAIN):
            self._write(tag)  # not within a header, so it is text
        else:
            self._part = None
            self._header = tag if tag == _CHANNEL else ""

    def _begin_message(self, header: str) -> None:
        channel = _CHANNEL_NAME.search(header)
        function = _FUNCTION.search(header)
        self._fresh = True
        if function is not None:
            self._part = "call"
            self._write(f"{CHANNEL_CALL}{function[1]}{_MESSAGE}")
        else:
            is_analysis = channel is not None and channel[1] == "analysis"
            self._part = "thinking" if is_analysis else "content"

    def _write(self, text: str) -> None:
        part = self._part
        if part is None:
            return
        target = self._thoughts if part == "thinking" else self._content
        if self._fresh and part in self._spoke and part != "call":
            target.append("\n")
        self._fresh = False
        self._spoke.add(part)
        target.append(text)


def _may_be_header(text: str) -> bool:
    """Return whether a text without tags may be the begin of a response's first header."""
    stripped = text.lstrip()
    return _RECIPIENT.startswith(stripped) or stripped.startswith(_RECIPIENT)


def parser_of(thinking: Thinking) -> ReasoningParser | ChannelParser:
    """Return the parser of a response with thinking."""
    return ChannelParser(thinking) if thinking.syntax.channels else ReasoningParser(thinking)
