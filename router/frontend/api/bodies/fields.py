"""Handling of the fields of a request body.

honoured   a field of the body's class, described by the text below it
accepted   ignored, because it has no effect here; hints are listed in ``x-baton-ignored``
refused    rejected with a 400 that names an alternative: ignoring it would change the answer
unknown    ignored and listed in the header ``x-baton-ignored``
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from baton.types.errors import InvalidRequestError

HEADER = "x-baton-ignored"
MAX_TOOLS = 512  # per request
_SHOWN_NAMES = 16
_SHOWN_CHARACTERS = 64
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.\[\]-]")


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is rejected.

    Attributes:
        harmless: Values that are accepted beside null, because they request nothing.
        instead: Advice to the client, the end of the error message.
    """

    harmless: tuple[object, ...]
    instead: str

    def allows(self, value: object) -> bool:
        """Return whether ``value`` is one of the harmless values."""
        # 1.0 is accepted for 1, but `1 == True` must not be.
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return value is None or any(
            value == harmless
            and (type(value) is type(harmless) or (number and not isinstance(harmless, bool)))
            for harmless in self.harmless
        )


class Ignored:
    """Parts of a request that have no effect: unknown fields, which ``strict`` rejects, and items.

    An item that cannot be used, such as a tool that only its provider can run, is never rejected.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._places: dict[str, str] = {}  # with the label for metrics

    def add(self, place: str, param: str) -> None:
        """Record an unknown field.

        Args:
            place: Path without indexes, such as ``messages[].mood``.
            param: Exact path, such as ``messages[3].mood``.

        Raises:
            InvalidRequestError: The fleet is strict.
        """
        if self._strict:
            raise InvalidRequestError(
                f"unknown parameter: {param:.200}; leave it out (clients.strict is set in the "
                "fleet file)",
                param=param[:200],
            )
        # Before the dot are known fields, so there are few labels.
        self._keep(place, place.rpartition(".")[0] or "body")

    def hint(self, name: str) -> None:
        """Record a hint that has no effect; never rejected."""
        self._keep(name, "hints")

    def leave_out(self, item: str, where: str) -> None:
        """Record an item of the known field ``where`` that cannot be used; never rejected."""
        self._keep(f"{where}.{item}", where)

    def _keep(self, place: str, label: str) -> None:
        if len(self._places) <= _SHOWN_NAMES:
            self._places[place] = label

    def labels(self) -> Iterator[str]:
        """Return the label of each distinct path, for metrics."""
        return iter(self._places.values())

    def __iter__(self) -> Iterator[str]:
        """Iterate over the distinct paths in the order of the body."""
        return iter(self._places)

    def __bool__(self) -> bool:
        """Return whether there are unknown fields."""
        return bool(self._places)

    def header(self) -> str:
        """Return the value of ``x-baton-ignored``, shortened and with safe characters only."""
        names = [_UNPRINTABLE.sub("?", place[:_SHOWN_CHARACTERS]) for place in self._places]
        more = ["..."] if len(names) > _SHOWN_NAMES else []
        return ", ".join(names[:_SHOWN_NAMES] + more)


def refuse(name: str, where: str, rule: Refused, value: Any) -> None:
    """Reject the field unless ``value`` is harmless."""
    if not rule.allows(value):
        raise InvalidRequestError.at(
            f"{where}{name}",
            f"is not supported, and ignoring it would change the answer; {rule.instead}",
        )
