"""What becomes of a field of a body.

honoured   it acts: a field of the body's class, whose text below it says how
accepted   taken and left aside, because here it changes nothing
refused    ignoring it would change the answer: a 400 says what to do instead
unknown    not in the table: left aside and named in the header ``x-baton-ignored``
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.types.errors import InvalidRequestError

HEADER = "x-baton-ignored"
MAX_TOOLS = 512  # that one call offers
_SHOWN_NAMES = 16
_SHOWN_CHARACTERS = 64
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.\[\]-]")


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that cannot be honoured.

    Attributes:
        harmless: Values that ask for nothing, and so are taken.
        instead: What to do, as the end of a sentence.
    """

    harmless: tuple[object, ...]
    instead: str

    def allows(self, value: object) -> bool:
        """Whether ``value`` asks for nothing."""
        # `1 == True` in Python; a client that writes 1.0 for 1 means the same.
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return any(
            value == one and (type(value) is type(one) or (number and not isinstance(one, bool)))
            for one in self.harmless
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """The fields of one kind of JSON object that its class does not have.

    Attributes:
        accepted: Name to why it changes nothing.
        refused: Name to what to do instead.
    """

    accepted: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, Refused] = field(default_factory=dict)

    def __or__(self, other: "Fields") -> "Fields":
        """Return the fields of both."""
        return Fields(
            accepted={**self.accepted, **other.accepted},
            refused={**self.refused, **other.refused},
        )


class Ignored:
    """Names of the fields that a call has and nobody here knows.

    Args:
        strict: Refuse them.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._places: dict[str, None] = {}

    def add(self, place: str, param: str) -> None:
        """A field was left aside.

        Args:
            place: Where such fields stand, as ``messages[].mood``.
            param: Where this one stands, as ``messages[3].mood``.

        Raises:
            InvalidRequestError: The fleet is strict.
        """
        if self._strict:
            raise InvalidRequestError(
                f"unknown parameter: {param:.200}; leave it out (this fleet's file says "
                "clients.strict)",
                param=param[:200],
            )
        if len(self._places) <= _SHOWN_NAMES:
            self._places[place] = None

    def __iter__(self) -> Iterator[str]:
        """Each place once, in the order of the body."""
        return iter(self._places)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._places)

    def header(self) -> str:
        """The value of ``x-baton-ignored``: short, and of harmless characters."""
        names = [_UNPRINTABLE.sub("?", place[:_SHOWN_CHARACTERS]) for place in self._places]
        more = ["..."] if len(names) > _SHOWN_NAMES else []
        return ", ".join(names[:_SHOWN_NAMES] + more)


def refuse(name: str, where: str, rule: Refused, value: Any) -> None:
    """Raise unless ``value`` asks for nothing.

    Raises:
        InvalidRequestError: Says what to do instead.
    """
    if not rule.allows(value):
        raise InvalidRequestError(
            f"{where}{name}: is not supported here, and ignoring it would change the answer; "
            f"{rule.instead}",
            param=f"{where}{name}",
        )
