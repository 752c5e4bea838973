"""Hash chain of the audit log: pure functions over lines of JSON.

    line 1    {"seq": 1, …, "prev_sha256": 64 zeros}
    line 2    {"seq": 2, …, "prev_sha256": SHA-256 of line 1 without its newline}

A changed, removed, inserted or moved line no longer fits the next one. The last line and a cut end
are checked against a `ChainHead` that is kept elsewhere.
"""

import hashlib
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec

ZERO = "0" * 64
_MOST_CHARS = 4096  # of a value in JSON


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """An audited act.

    Attributes:
        id: Random; an entry that arrives twice is written once.
        time: Time of the act, ISO 8601 in UTC; default: now.
        who: Id of the API key, or the operator of a command.
        source: Address of the caller; ``from`` in the log.
        before: State before the act, as far as it changed.
        after: State after the act, or its arguments.
    """

    id: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    time: str = msgspec.field(
        default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds")
    )
    who: str
    source: str = msgspec.field(default="", name="from")
    verb: str
    what: str = ""
    before: Any = None
    after: Any = None


class ChainHead(msgspec.Struct, frozen=True):
    """Number and SHA-256 of the last line."""

    seq: int = 0
    sha256: str = ZERO


class ChainCheck(msgspec.Struct, frozen=True):
    """Result of a check.

    Attributes:
        lines: Number of valid lines from the start.
        broken_line: Number of the first wrong or missing line; 0: there is none.
    """

    lines: int
    head: ChainHead
    broken_line: int = 0
    problem: str = ""


def sealed(entry: Entry, head: ChainHead) -> tuple[bytes, ChainHead]:
    """Return the line of an entry behind ``head``, with its newline, and the new head."""
    fields = msgspec.to_builtins(entry)
    for name in ("before", "after"):
        fields[name] = _short(fields[name])
    line = msgspec.json.encode({"seq": head.seq + 1, **fields, "prev_sha256": head.sha256})
    return line + b"\n", ChainHead(head.seq + 1, hashlib.sha256(line).hexdigest())


def head_of(line: bytes) -> ChainHead:
    """Return the head that a line without its newline makes.

    Raises:
        ValueError: It is no line of an audit log.
    """
    return ChainHead(_fields(line)[0], hashlib.sha256(line).hexdigest())


def verify(lines: Iterable[bytes], known: ChainHead | None = None) -> ChainCheck:
    """Check a chain, given with or without newlines.

    ``known``: head that was recorded elsewhere; the file may be longer.
    """
    head = ChainHead()
    for number, raw in enumerate(lines, 1):
        line = raw.removesuffix(b"\n")
        try:
            seq, previous = _fields(line)
        except ValueError as error:
            return ChainCheck(number - 1, head, number, str(error))
        if seq != number or previous != head.sha256:
            what = "its prev_sha256 is not the hash of the line before"
            if seq != number:
                what = f"its seq is {seq}"
            return ChainCheck(number - 1, head, number, f"{what}: a line was changed or removed")
        head = ChainHead(number, hashlib.sha256(line).hexdigest())
        if known is not None and known.seq == number and known.sha256 != head.sha256:
            return ChainCheck(number - 1, head, number, "its hash is not the one that was recorded")
    if known is not None and known.seq > head.seq:
        missing = f"{known.seq} lines were recorded: the end was cut"
        return ChainCheck(head.seq, head, head.seq + 1, missing)
    return ChainCheck(head.seq, head)


def _fields(line: bytes) -> tuple[int, str]:
    try:
        fields = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise ValueError(f"it is no entry: {error}") from error
    return fields.seq, fields.prev_sha256


class _Line(msgspec.Struct):
    seq: int
    prev_sha256: str


def _short(value: Any) -> Any:
    text = msgspec.json.encode(value).decode()
    return value if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}…"
