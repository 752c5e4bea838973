"""Streaming conversion of token ids to text, for one choice. Pure: no clock, no I/O.

    tokens ──▶ bytes ──▶ complete characters ──▶ text ──▶ output
                  └ held: part of a character     └ held: possible start of a stop string

A character or a stop string may be split over tokens. The bytes of an incomplete character are
held, and so is the longest suffix of the text that may begin a stop string. The output is the same
for every grouping of tokens into calls.
"""

import codecs
from collections.abc import Sequence

from baton.text.tokenizer import TextTokenizer


class StopMatcher:
    """Finds the stop string that is complete first, and holds text that may begin one.

    If two stop strings end at the same character, the longer one counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self.held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return the text to output now, and the stop string that ended it, if any."""
        if not self._stops:
            return text, None
        text = self.held + text
        self.held = ""
        found = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text
        ]
        if found:
            end, _, stop = min(found)
            return text[: end - len(stop)], stop
        keep = max(_overlap(text, stop) for stop in self._stops)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def release(self) -> str:
        """Return the held text at the end of the input."""
        held = self.held
        self.held = ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of ``stop`` that ends ``text``."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class Detokenizer:
    """Text of one choice. It continues the prompt, so a leading space is kept.

    Args:
        min_tokens: Number of first tokens in which a stop string must not begin.
        stop_text: Whether the stop string or token is included in the text.
        special_ids: Special tokens to output; None for all.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        stop_text: bool = False,
        special_ids: frozenset[int] | None = frozenset(),
    ) -> None:
        self._stop_text = stop_text
        self._shown_ids = tokenizer.special_ids if special_ids is None else special_ids
        self._bytes = self._chosen_bytes if self._shown_ids else tokenizer.shown_bytes
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._whole = {} if self._shown_ids else tokenizer.shown_texts
        self._half = bool(self._shown_ids)  # a character is incomplete, or `_whole` is unused
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self.tokens = 0
        self.text_length = 0  # characters decoded so far, output or held
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """Add one token and return the text to output now; empty after a stop string."""
        if self.stopped_by is not None:
            return ""
        self.tokens += 1
        # A dictionary has the text of nearly every token and is ten times as fast as the decoder.
        text = None if self._half else self._whole[token_id]
        if text is None:
            text = self._decode(token_id)
        self.text_length += len(text)
        if self._matcher is None or self.tokens <= self._min_tokens:
            return text
        shown, self.stopped_by = self._matcher.push(text)
        return shown + self.stopped_by if self._stop_text and self.stopped_by else shown

    def _decode(self, token_id: int) -> str:
        text = self._utf8.decode(self._bytes(token_id))
        self._half = bool(self._shown_ids) or bool(self._utf8.getstate()[0])
        return text

    def _chosen_bytes(self, token_id: int) -> bytes:
        if token_id in self._shown_ids:
            return self._tokenizer.token_bytes(token_id)
        return self._tokenizer.shown_bytes(token_id)

    def finish(self, stop_token: int | None = None) -> str:
        """Return held text at the end of the tokens, without an incomplete character.

        ``stop_token`` ended the response, if set; it is not part of the response.
        """
        if self.stopped_by is not None:
            return ""
        held = self._matcher.release() if self._matcher is not None else ""
        if stop_token is not None and self._stop_text:
            held += self._utf8.decode(self._bytes(stop_token))
        return held
