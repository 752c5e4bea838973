"""Prompts of sessions, to find those that changed at a place where they should have grown.

An agent sends its conversation again with each turn. If a text near its beginning differs in each
turn, such as a time, nothing behind it is found in the cache:

    earlier prompt   S S S 9 : 5 9 U U U U A A A
    this prompt      S S S 1 0 : 0 U U U U A A A U U
                           ▲       └── equal again, and lost to the cache
                           └── changed at token 3

Several prompts of a session are kept, since its sub-agents have prompts of their own. A prompt that
is not equal again behind the change is another conversation, and no change.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST_LOST_TOKENS = 256
"""Fewer tokens behind a change are no loss that is worth a report."""
_MOST_BYTES = 64 * 2**20
_PROMPTS = 8  # of one session
_PIECE_TOKENS = 32  # which are equal again
_BEHIND_TOKENS = (16, 64, 256, 1024, 4096)  # where a piece is looked for behind the change
_MOVED_TOKENS = 2048  # as far as a changed text may move what follows
_PLACES = 64  # that are tried
_SHOWN_BEFORE = 96  # more than operators see, so that no part of a secret is left at the ends
_SHOWN_BEHIND = 160

Tokens = NDArray[np.uint32]


class PromptChange(NamedTuple):
    """Change of a session's prompt.

    Attributes:
        at_token: First token that differs from the earlier prompt.
        lost_tokens: Tokens behind the change that both prompts have.
        earlier: Tokens of the earlier prompt around the change.
        now: Tokens of this prompt around the change.
    """

    at_token: int
    of_tokens: int
    lost_tokens: int
    earlier: tuple[int, ...]
    now: tuple[int, ...]

    @property
    def shows_begin(self) -> bool:
        """True if ``earlier`` and ``now`` begin at the first token of their prompts."""
        return self.at_token <= _SHOWN_BEFORE

    def explain(self) -> dict[str, Any]:
        """Return the part of a request report, without text and tokens."""
        return {
            "at_token": self.at_token,
            "of_tokens": self.of_tokens,
            "lost_tokens": self.lost_tokens,
            "sentence": f"The prompt of this session changed at token {self.at_token:,} of "
            f"{self.of_tokens:,}: {self.lost_tokens:,} equal tokens behind it could not be reused.",
        }


class SessionPrompts:
    """Latest prompts of sessions, which several threads may note.

    Args:
        most_bytes: Size of all prompts; those of the least recently used sessions are forgotten.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._sessions: OrderedDict[tuple[str, ...], list[Tokens]] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, session: tuple[str, ...], prompt: Sequence[int]) -> PromptChange | None:
        """Keep a prompt of a session; return how it changed, if it did.

        ``session``: tenant, cache scope, model, and id of the session.
        """
        new = np.asarray(prompt, dtype=np.uint32)
        with self._lock:
            kept = list(self._sessions.get(session, ()))
        equal = [_equal_tokens(earlier, new) for earlier in kept]
        change = None
        replaced: Tokens | None = None
        for earlier, at in sorted(zip(kept, equal, strict=True), key=lambda pair: -pair[1]):
            grown = at == min(len(earlier), len(new))
            lost_tokens = 0 if grown else _equal_again(earlier, new, at)
            if grown or lost_tokens:
                replaced = earlier
                if lost_tokens >= LEAST_LOST_TOKENS:
                    change = _change(earlier, new, at, lost_tokens)
                break
        self._keep(session, new, replaced)
        return change

    def forget(self, tenant: str) -> None:
        """Forget the prompts of a tenant, whose data are deleted."""
        with self._lock:
            for session in [session for session in self._sessions if session[0] == tenant]:
                self._bytes -= sum(prompt.nbytes for prompt in self._sessions.pop(session))

    def _keep(self, session: tuple[str, ...], new: Tokens, replaced: Tokens | None) -> None:
        with self._lock:
            prompts = self._sessions.pop(session, [])
            rest = [prompt for prompt in prompts if prompt is not replaced][1 - _PROMPTS :]
            self._bytes += new.nbytes + sum(one.nbytes for one in rest)
            self._bytes -= sum(prompt.nbytes for prompt in prompts)
            self._sessions[session] = [*rest, new]
            while self._bytes > self._most_bytes:
                _, forgotten = self._sessions.popitem(last=False)
                self._bytes -= sum(prompt.nbytes for prompt in forgotten)


def _change(earlier: Tokens, new: Tokens, at: int, lost_tokens: int) -> PromptChange:
    shown = slice(max(at - _SHOWN_BEFORE, 0), at + _SHOWN_BEHIND)
    windows = (tuple(earlier[shown].tolist()), tuple(new[shown].tolist()))
    return PromptChange(at, len(new), lost_tokens, *windows)


def _equal_tokens(earlier: Tokens, new: Tokens) -> int:
    """Return the number of first tokens that are equal."""
    length = min(len(earlier), len(new))
    differs = earlier[:length] != new[:length]
    return int(differs.argmax()) if differs.any() else length


def _equal_again(earlier: Tokens, new: Tokens, at: int) -> int:
    """Return the tokens behind a change from which both prompts are equal again; 0: they are not.

    A changed text may be shorter or longer than before, so that what follows has moved.
    """
    for behind in _BEHIND_TOKENS:
        begin = at + behind
        piece = earlier[begin : begin + _PIECE_TOKENS]
        if len(piece) < _PIECE_TOKENS:
            break
        window = new[at : begin + _MOVED_TOKENS]
        place = _place(piece.tobytes(), window.tobytes())
        if place is not None:
            return _equal_tokens(earlier[begin:], new[at + place :])
    return 0


def _place(piece: bytes, window: bytes) -> int | None:
    """Return the token in ``window`` at which ``piece`` begins."""
    place = -1
    for _ in range(_PLACES):
        place = window.find(piece, place + 1)
        if place < 0:
            return None
        if place % 4 == 0:  # otherwise it begins within a token
            return place // 4
    return None
