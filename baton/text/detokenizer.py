"""Token ids to text as they arrive, for one choice of one request. Pure: no clock, no I/O.

    tokens ──▶ bytes ──▶ whole characters ──▶ text ──▶ shown
                  └ waits: half a character     └ waits: what could begin a stop string

Two things wait. A character may be split over tokens: its bytes wait until it is whole. A stop
string may be split over tokens: the longest suffix of the text that could begin one waits, and
nothing more. However tokens are grouped into calls, the same text comes out.
"""

import codecs
from collections.abc import Iterable, Sequence

from baton.text.tokenizer import TextTokenizer


class StopMatcher:
    """Finds the first stop string to be complete, and holds back what could begin one.

    Args:
        stops: Non-empty strings. Where two end at the same character, the longer counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self.held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text.

        Returns:
            What may be shown now, and the stop string that ended the text, if one did.
        """
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
        """What is held, when no more text can come."""
        held = self.held
        self.held = ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ends ``text``."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class Detokenizer:
    """The text of one choice: it continues the prompt, so its first space is its own.

    Args:
        tokenizer: Gives the bytes of a token.
        stops: Stop strings.
        min_tokens: No stop string counts that begins within the first so many tokens.
        stop_text: What ends the text is shown at its end.
        special_ids: Special tokens that are shown all the same; None: all of them.
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
        self._half = bool(self._shown_ids)  # a character has begun, or `_whole` does not count
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self.tokens = 0
        self.text_length = 0  # characters decoded so far, shown or held
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """Take one token.

        Returns:
            Text that may be shown now. Empty once a stop string has ended the text.
        """
        if self.stopped_by is not None:
            return ""
        self.tokens += 1
        # A dictionary has the text of nearly every token; the decoder takes ten times as long.
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

    def push_all(self, token_ids: Iterable[int]) -> str:
        """Take many tokens; stops early where a stop string ends the text."""
        return "".join(map(self.push, token_ids))

    def finish(self, stop_token: int | None = None) -> str:
        """No more tokens come: what was held for a stop string.

        A character that the end cut in half is not shown.

        Args:
            stop_token: The token that ended the text, if one did; it is no part of the answer.
        """
        if self.stopped_by is not None:
            return ""
        held = self._matcher.release() if self._matcher is not None else ""
        if stop_token is not None and self._stop_text:
            held += self._utf8.decode(self._bytes(stop_token))
        return held

    @classmethod
    def replay(
        cls,
        tokenizer: TextTokenizer,
        token_ids: Sequence[int],
        stops: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> "Detokenizer":
        """A detokenizer that has seen ``token_ids`` (their text was shown before)."""
        fresh = cls(tokenizer, stops, min_tokens)
        fresh.push_all(token_ids)
        return fresh
