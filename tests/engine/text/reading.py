"""Output of the incremental parsers for a text in pieces."""

from collections.abc import Iterable
from typing import Any


def thoughts_and_content(parser: Any, pieces: Iterable[str]) -> tuple[str, str]:
    """Return all thinking and all content."""
    outputs = [*map(parser.push, pieces), parser.finish()]
    return "".join(thought for thought, _ in outputs), "".join(text for _, text in outputs)


def content_and_calls(parser: Any, pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return all content, and name and arguments of each call; ids must be ``call_0``, …"""
    content = ""
    calls: dict[int, list[str]] = {}
    for text, deltas in [*map(parser.push, pieces), parser.finish()]:
        content += text
        for delta in deltas:
            if delta.id is not None:
                assert delta.id == f"call_{delta.index}"
                calls[delta.index] = [delta.name, ""]
            calls[delta.index][1] += delta.arguments
    return content, [(name, arguments) for _, (name, arguments) in sorted(calls.items())]
