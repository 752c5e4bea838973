"""Session of a call, by the words of several clients and gateways."""

import re
from collections.abc import Mapping
from typing import NamedTuple

HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",  # Codex
    "session_id",  # Codex, older
    "x-session-affinity",  # opencode
    "x-dynamo-session-id",
)
FLOWS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")  # older: the second
_ID = re.compile(r"[!-~]{1,256}")
_IN_USER_ID = re.compile(r'session_(?:id":\s{0,4}")?([0-9a-zA-Z-]{8,64})"?\}?$')  # Claude Code


class Session(NamedTuple):
    """Name that a client gives to a conversation, and the header or field that has it."""

    id: str = ""
    source: str = ""

    def __bool__(self) -> bool:
        """Return whether the client has named a session."""
        return bool(self.id)


NO_SESSION = Session()


def session_of_headers(headers: Mapping[str, str]) -> Session:
    """Return the session in the headers; ids of other characters, or too long ones, are none."""
    for name in HEADERS:
        value = headers.get(name, "")
        if value and _ID.fullmatch(value):
            return Session(value, name)
    return NO_SESSION


def is_id(value: str) -> bool:
    """Return whether a value can name a session or a flow."""
    return _ID.fullmatch(value) is not None


def flow_of_headers(headers: Mapping[str, str]) -> str:
    """Return llm-d's fairness id: requests of one tenant take turns by it; empty: by session."""
    named = (headers.get(name, "") for name in FLOWS)
    return next((flow for flow in named if flow and _ID.fullmatch(flow)), "")


def session_of(in_headers: Session, cache_key: str | None, user: str | None) -> Session:
    """Return the session of a call: of its headers, else of its body."""
    if in_headers:
        return in_headers
    if cache_key and _ID.fullmatch(cache_key):
        return Session(cache_key, "prompt_cache_key")
    match = _IN_USER_ID.search(user or "")
    return Session(match[1], "metadata.user_id") if match is not None else NO_SESSION
