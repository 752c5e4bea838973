"""Opening of a conversation, by which all its requests go to the same version of a model."""

from collections.abc import Iterable, Sequence
from typing import Protocol

_MOST_CHARS = 4096


class _HasText(Protocol):
    """Part of a message."""

    @property
    def text(self) -> str | None: ...


_Content = str | int | _HasText | Sequence["_Content"] | None


class _Turn(Protocol):
    """Message or item of a conversation."""

    @property
    def role(self) -> str | None: ...
    @property
    def content(self) -> _Content: ...


def opening_of_turns(turns: Iterable[_Turn]) -> str:
    """Return the first text of the user in a list of messages or items."""
    texts = []
    for turn in turns:
        if turn.role in ("system", "developer"):
            continue
        texts.append(f"{turn.role} {opening_text(turn.content)}")
        if turn.role == "user":
            break
    return "\n".join(texts)


def opening_text(content: _Content) -> str:
    """Return the beginning of a prompt or of a message's content."""
    if isinstance(content, str):
        return content[:_MOST_CHARS]
    if isinstance(content, int):
        return str(content)
    if isinstance(content, Sequence):
        return " ".join(opening_text(part) for part in content[:64])[:_MOST_CHARS]
    return opening_text(content.text or "") if content is not None else ""
