"""Opening of a conversation, by which all its requests go to the same version of a model."""

from collections.abc import Iterable
from typing import Any

_MOST_CHARS = 4096


def opening_of(body: Any) -> str:
    """Return the text that the requests of a conversation have in common.

    It is ``user`` if the client sends it, or else the first message of the user, or the beginning
    of a prompt or an input.
    """
    if user := getattr(body, "user", None):
        return str(user)
    if messages := getattr(body, "messages", None):
        return opening_of_turns(messages)
    for name in ("prompt", "input", "query", "text_1"):
        if (given := getattr(body, name, None)) is not None:
            return _text(given)
    return ""


def opening_of_turns(turns: Iterable[Any]) -> str:
    """Return the first text of the user in a list of messages or items."""
    texts = []
    for turn in turns:
        role = getattr(turn, "role", None)
        if role in ("system", "developer"):
            continue
        texts.append(f"{role} {_text(getattr(turn, 'content', ''))}")
        if role == "user":
            break
    return "\n".join(texts)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content[:_MOST_CHARS]
    if isinstance(content, list | tuple):
        return " ".join(_text(part) for part in content[:64])[:_MOST_CHARS]
    if isinstance(content, int):
        return str(content)
    return _text(getattr(content, "text", None) or "")
