"""Streaming separation of reasoning and content in a response. Pure: no clock, no I/O.

    begin ──"<think>"──▶ thinking ──"</think>"──▶ content
      └── other text ─────────────────────────────────▲

Some chat templates end the prompt with ``<think>``, so that the response begins with thinking; in
others the model writes the tag. White space around both parts is dropped. The output does not
depend on how the text is split into pieces.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from baton.text.detokenizer import StopMatcher
from baton.text.tokenizer import TextTokenizer
from baton.types.errors import InvalidRequestError


class ReasoningTags(NamedTuple):
    """Tags around the thinking."""

    begin: str
    end: str


_CHANNEL_TAGS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
_OTHER_CHANNEL_TAGS = ("<|constrain|>", "<|call|>")
_ANALYSIS = ReasoningTags("<|channel|>analysis<|message|>", "<|end|>")
_KNOWN = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<reasoning>", "</reasoning>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningSyntax:
    """Reasoning syntax of a model.

    Attributes:
        begin_id: Token id of the begin tag; None if it is several tokens.
        end_id: Token id of the end tag; None if it is several tokens.
        special_ids: Ids of the tags that are special tokens, which are not output otherwise.
        channels: Ids of the tags around messages in channels; empty for models without channels.
    """

    tags: ReasoningTags
    begin_id: int | None = None
    end_id: int | None = None
    special_ids: frozenset[int] = frozenset()
    channels: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, template: str | None, tokenizer: TextTokenizer) -> Self | None:
        """Return the syntax of a reasoning model; None for other models.

        The chat template of a reasoning model contains the tags, or its vocabulary has them as
        tokens.
        """
        if "<|channel|>analysis" in (template or "") and (found := _channels(tokenizer)):
            special = tokenizer.special_ids & set(found.values())
            return cls(tags=_ANALYSIS, special_ids=special, channels=found)
        ids = {tag: tokenizer.backend.token_to_id(tag) for tags in _KNOWN for tag in tags}
        in_template = [tags for tags in _KNOWN if tags.end in (template or "")]
        in_vocabulary = [tags for tags in _KNOWN if all(ids[tag] is not None for tag in tags)]
        tags = next(iter([*in_template, *in_vocabulary]), None)
        if tags is None:
            return None
        begin_id = ids[tags.begin]
        end_id = ids[tags.end]
        special = tokenizer.special_ids & {begin_id, end_id}
        return cls(tags=tags, begin_id=begin_id, end_id=end_id, special_ids=special)

    def begun_by(self, prompt: str) -> bool:
        """Return whether a prompt ends within thinking."""
        return prompt.rstrip().endswith(self.tags.begin)

    def closed_by(self, prompt: str) -> bool:
        """Return whether a prompt ends with completed thinking, so the response has none."""
        return not self.channels and prompt.rstrip().endswith(self.tags.end)

    def grammar(self, *, begun: bool, end_ids: Sequence[int], budget: int | None) -> str:
        """Return a Lark grammar of the thinking and the white space behind it.

        Args:
            begun: Whether the prompt ends within the thinking; otherwise thinking is optional.
            end_ids: Tokens that end a response of the model.
            budget: Maximum number of tokens; None for no limit.

        Raises:
            InvalidRequestError: There is a budget, and the end tag is not a single token.
        """
        if self.channels:
            return self._channel_grammar(begun=begun, end_ids=end_ids, budget=budget)
        if self.end_id is not None:
            other = ",".join(map(str, sorted({self.end_id, *end_ids})))
            inner = f"<[^{other}]>{'*' if budget is None else f'{{0,{budget}}}'} "
            rules = [f"thought: {'' if budget == 0 else inner}<[{self.end_id}]>"]
        elif budget is not None:
            raise InvalidRequestError(
                f"thinking_token_budget is not supported: this model writes {self.tags.end} as "
                "several tokens; use max_tokens",
                param="thinking_token_budget",
            )
        else:
            rules = [f"thought[lazy]: /(.|\\n)*{_in_regex(self.tags.end)}/"]
        begin = f"<[{self.begin_id}]>" if self.begin_id is not None else json.dumps(self.tags.begin)
        start = "thought SPACE" if begun else f"({begin} thought SPACE)?"
        return "\n".join([f"start: {start}", *rules, "SPACE: /[ \\n]{0,4}/"])

    def _channel_grammar(self, *, begun: bool, end_ids: Sequence[int], budget: int | None) -> str:
        """Return a grammar of messages of thinking, and of the header of the answer behind them."""
        start, channel, message, end = (f"<[{self.channels[tag]}]>" for tag in _CHANNEL_TAGS)
        other = ",".join(map(str, sorted({*self.channels.values(), *end_ids})))
        inner = f"<[^{other}]>{'*' if budget is None else f'{{0,{budget}}}'}"
        thoughts = f'{"" if budget == 0 else inner} {end} {start} "assistant"'
        several = "?" if budget is not None else "*"
        first = "thoughts" if begun else f"message{several}"
        return "\n".join(
            [
                f'start: {first} ({channel} "final" {message})?',
                f'message: {channel} "analysis" {message} thoughts',
                f"thoughts: {thoughts}",
            ]
        )


def _channels(tokenizer: TextTokenizer) -> dict[str, int]:
    """Return the ids of the tags of channels; empty if the vocabulary lacks one of them."""
    tags = _CHANNEL_TAGS + _OTHER_CHANNEL_TAGS
    ids = {tag: tokenizer.backend.token_to_id(tag) for tag in tags}
    return {} if None in ids.values() else {tag: i for tag, i in ids.items() if i is not None}


def _in_regex(text: str) -> str:
    return "".join(f"\\{c}" if c in "/[]" else c for c in text)


@dataclass(frozen=True, slots=True)
class Thinking:
    """Reasoning of one response.

    Attributes:
        begun: Whether the prompt ends within the thinking.
        shown: Whether the client receives the thinking.
    """

    syntax: ReasoningSyntax
    begun: bool = False
    shown: bool = True


class _Trimmed:
    def __init__(self) -> None:
        self._begun = False
        self._space = ""

    def push(self, text: str) -> str:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        return kept


class ReasoningParser:
    """Parser of one response."""

    def __init__(self, thinking: Thinking) -> None:
        self._tags = thinking.syntax.tags
        self._begun = thinking.begun
        self._buffer = ""
        self._state = "begin"
        self._end = StopMatcher((self._tags.end,))
        self._thoughts = _Trimmed()
        self._before_content = False  # drop white space between thinking and content

    @property
    def thinking(self) -> bool:
        """Return whether the next text is thinking, as far as known."""
        return self._state == "thinking" or (self._state == "begin" and self._begun)

    def push(self, text: str) -> tuple[str, str]:
        """Add text; return thinking and content that are certain now."""
        if self._state == "begin":
            text = self._begin(text)
        thoughts = ""
        if self._state == "thinking":
            thoughts, text = self._think(text)
        return thoughts, self._content(text) if self._state == "content" else ""

    def _begin(self, text: str) -> str:
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
        """Return held thinking and content at the end of the text."""
        if self._state == "begin":
            held = self._buffer
            self._buffer = ""
            return (self._thoughts.push(held), "") if self._begun else ("", held)
        return (self._thoughts.push(self._end.release()) if self._state == "thinking" else ""), ""
