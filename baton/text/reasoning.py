"""Thinking out of an answer's text, as it arrives. Pure: no clock, no I/O.

    begin ──"<think>"──▶ thinking ──"</think>"──▶ content
      └── anything else: it is content ───────────────▲

Some chat templates end the prompt with ``<think>``, so that the answer begins within the thinking;
others leave it to the model. White space at the borders of both parts belongs to neither. However
the text is cut into pieces, the same thinking and the same content come out.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from baton.text.detokenizer import StopMatcher
from baton.text.tokenizer import TextTokenizer
from baton.types.errors import InvalidRequestError


class ReasoningTags(NamedTuple):
    """What stands around the thinking."""

    begin: str
    end: str


_KNOWN = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<reasoning>", "</reasoning>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningSyntax:
    """How a model thinks.

    Attributes:
        tags: Around the thinking.
        begin_id: The tag as one token; None if it is several.
        end_id: The same.
        special_ids: Those of them that are special tokens, which text does not show otherwise.
    """

    tags: ReasoningTags
    begin_id: int | None = None
    end_id: int | None = None
    special_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, template: str | None, tokenizer: TextTokenizer) -> Self | None:
        """The syntax of a model that thinks; None for one that does not.

        Its chat template speaks of the tags, or its vocabulary has them as tokens of their own.
        """
        ids = {tag: tokenizer.backend.token_to_id(tag) for tags in _KNOWN for tag in tags}
        told = [tags for tags in _KNOWN if tags.end in (template or "")]
        known = [tags for tags in _KNOWN if all(ids[tag] is not None for tag in tags)]
        tags = next(iter([*told, *known]), None)
        if tags is None:
            return None
        begin_id = ids[tags.begin]
        end_id = ids[tags.end]
        special = tokenizer.special_ids & {begin_id, end_id}
        return cls(tags=tags, begin_id=begin_id, end_id=end_id, special_ids=special)

    def begun_by(self, prompt: str) -> bool:
        """Whether a prompt ends within thinking."""
        return prompt.rstrip().endswith(self.tags.begin)

    def closed_by(self, prompt: str) -> bool:
        """Whether a prompt ends with thinking that is over: the answer has none."""
        return prompt.rstrip().endswith(self.tags.end)

    def grammar(self, *, begun: bool, end_ids: Sequence[int], budget: int | None) -> str:
        """A Lark grammar of the thinking and the white space behind it.

        Args:
            begun: The prompt ends within it; otherwise there need be none.
            end_ids: Of the model, tokens that end an answer.
            budget: So many tokens at most; None: any number.

        Raises:
            InvalidRequestError: There is a budget, and the end is no single token to cut with.
        """
        if self.end_id is not None:
            other = ",".join(map(str, sorted({self.end_id, *end_ids})))
            inner = f"<[^{other}]>{'*' if budget is None else f'{{0,{budget}}}'} "
            rules = [f"thought: {'' if budget == 0 else inner}<[{self.end_id}]>"]
        elif budget is not None:
            raise InvalidRequestError(
                f"thinking_token_budget: this model writes {self.tags.end} in several tokens, so "
                "its thinking cannot be cut; use max_tokens",
                param="thinking_token_budget",
            )
        else:
            rules = [f"thought[lazy]: /(.|\\n)*{_in_regex(self.tags.end)}/"]
        begin = f"<[{self.begin_id}]>" if self.begin_id is not None else json.dumps(self.tags.begin)
        start = "thought SPACE" if begun else f"({begin} thought SPACE)?"
        return "\n".join([f"start: {start}", *rules, "SPACE: /[ \\n]{0,4}/"])


def _in_regex(text: str) -> str:
    return "".join(f"\\{c}" if c in "/[]" else c for c in text)


@dataclass(frozen=True, slots=True)
class Thinking:
    """How one answer thinks.

    Attributes:
        syntax: Of the model.
        begun: The prompt ends within the thinking.
        shown: The client wants to see it.
    """

    syntax: ReasoningSyntax
    begun: bool = False
    shown: bool = True


class _Trimmed:
    """Text without the white space at its two ends, which show only as it goes on."""

    def __init__(self) -> None:
        self._begun = False
        self._space = ""

    def push(self, text: str) -> str:
        """Take more; returns what is certain."""
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return kept


class ReasoningParser:
    """Reads one answer.

    Args:
        thinking: How it thinks.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._tags = thinking.syntax.tags
        self._begun = thinking.begun
        self._buffer = ""
        self._state = "begin"
        self._end = StopMatcher((self._tags.end,))
        self._thoughts = _Trimmed()
        self._before_content = False  # the white space between thinking and content is dropped

    @property
    def thinking(self) -> bool:
        """Whether the next text will be thinking, as far as is known."""
        return self._state == "thinking" or (self._state == "begin" and self._begun)

    def push(self, text: str) -> tuple[str, str]:
        """Take more text; returns what is certain now: thinking, content."""
        if self._state == "begin":
            text = self._begin(text)
        thoughts = ""
        if self._state == "thinking":
            thoughts, text = self._think(text)
        return thoughts, self._content(text) if self._state == "content" else ""

    def _begin(self, text: str) -> str:
        """Look for the first tag; returns what is behind it, or the text that has none."""
        self._buffer += text
        found = self._buffer.lstrip()
        begin = self._tags.begin
        if len(found) < len(begin) and begin.startswith(found):
            return ""
        held = self._buffer
        self._buffer = ""
        if found.startswith(begin):
            self._state = "thinking"
            return found[len(begin) :]
        self._state = "thinking" if self._begun else "content"
        return held

    def _think(self, text: str) -> tuple[str, str]:
        """Thinking, and what stands behind its end."""
        whole = self._end.held + text
        shown, end = self._end.push(text)
        if end is None:
            return self._thoughts.push(shown), ""
        self._state = "content"
        self._before_content = True
        return self._thoughts.push(shown), whole[len(shown) + len(end) :]

    def _content(self, text: str) -> str:
        if self._before_content:
            text = text.lstrip()
            self._before_content = not text
        return text

    def finish(self) -> tuple[str, str]:
        """No more text comes: what was held."""
        if self._state == "begin":
            held = self._buffer
            self._buffer = ""
            return (self._thoughts.push(held), "") if self._begun else ("", held)
        return (self._thoughts.push(self._end.release()) if self._state == "thinking" else ""), ""
