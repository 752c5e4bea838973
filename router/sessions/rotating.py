"""Texts that clients put into system prompts, and that differ in each call.

Such a text at the beginning of a prompt makes everything behind it differ, so that nothing of a
conversation is found in the cache. It means nothing to a model, and is left out of the prompt.
"""

import re
from typing import Any, NamedTuple

_SYSTEM_ROLES = ("system", "developer")


class RotatingText(NamedTuple):
    """A text at the beginning of a system message.

    Attributes:
        name: Name in ``x-baton-ignored``.
        pattern: The text; at most one line.
        source: The client that sends it, and a description.
    """

    name: str
    pattern: re.Pattern[str]
    source: str


ROTATING_TEXTS = (
    RotatingText(
        "x-anthropic-billing-header",
        re.compile(
            r"x-anthropic-billing-header:(?: {0,8}[a-z0-9_-]{1,32}=[^;\s]{0,256}(?:;|(?=\s)|$))*"
            r" {0,8}\n?"
        ),
        "Claude Code: `cch` is a hash of the call (vllm#36829, claude-code#87227)",
    ),
)


def without_rotating_texts(conversation: list[dict[str, Any]]) -> list[str]:
    """Remove rotating texts from the system messages of a conversation; return their names.

    A system message that has no other text is removed as well, unless it is the only message.
    """
    removed: list[str] = []
    for message in [entry for entry in conversation if entry["role"] in _SYSTEM_ROLES]:
        for text in ROTATING_TEXTS:
            match = text.pattern.match(message["content"])
            if match is None:
                continue
            removed.append(text.name)
            message["content"] = message["content"][match.end() :]
            if not message["content"] and len(conversation) > 1:
                conversation.remove(message)
    return removed
