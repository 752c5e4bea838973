"""Lines of a batch's input and output files."""

import hashlib
from typing import Any, NamedTuple

import msgspec
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json

MAX_CUSTOM_ID_CHARS = 512
LOWEST_PRIORITY = 2**31 - 1
"""Replaces the line's own ``priority``: batches run after all other requests."""

_STREAMING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_BOOLEAN = TypeAdapter(bool | None)  # as in the bodies of calls
_BOM = b"\xef\xbb\xbf"


class LineRequest(NamedTuple):
    """A valid line of a batch."""

    custom_id: str
    body: bytes


class LineFault(NamedTuple):
    """An invalid line of a batch."""

    custom_id: str | None  # None if it cannot be read
    code: str
    message: str


def read_line(
    raw: bytes, number: int, endpoint: str, seen: set[bytes], max_bytes: int
) -> LineRequest | LineFault:
    """Parse a line.

    ``raw``: bytes of the line; more than ``max_bytes`` if it was cut. ``seen``: digests of all
    custom ids so far, to which this one is added.
    """
    if len(raw) > max_bytes:
        return _fault(None, number, "line_too_long", f"is longer than {max_bytes} bytes")
    try:
        text = raw.removeprefix(_BOM) if number == 1 else raw
        line = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        return _fault(None, number, "invalid_json_line", f"is not valid JSON: {error}")
    if not isinstance(line, dict):
        return _fault(None, number, "invalid_json_line", "is not a JSON object")
    name = line.get("custom_id")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_CUSTOM_ID_CHARS:
        return _fault(
            None,
            number,
            "invalid_custom_id",
            f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters",
        )
    fault = _wrong(line, endpoint)
    if fault is not None:
        return _fault(name, number, *fault)
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    if digest in seen:
        return _fault(name, number, "duplicate_custom_id", "custom_id is used by an earlier line")
    body = bytes(msgspec.json.decode(text, type=dict[str, msgspec.Raw])["body"])
    try:
        from_json(body)
    except ValueError as error:  # calls accept less deep objects
        return _fault(name, number, "invalid_body", f"body: {error}")
    seen.add(digest)
    return LineRequest(name, _with_priority(body, is_empty=not line["body"]))


def _with_priority(body: bytes, *, is_empty: bool) -> bytes:
    """Return a body with the lowest priority, and with its own digits of numbers."""
    comma = b"" if is_empty else b","
    return b'%b%b"priority":%d}' % (body.rstrip().removesuffix(b"}"), comma, LOWEST_PRIORITY)


def _wrong(line: dict[str, Any], endpoint: str) -> tuple[str, str] | None:
    """Return code and message of a line's error, or None."""
    if line.get("method") not in (None, "POST"):
        return "invalid_method", "method must be POST"
    if line.get("url") != endpoint:
        return "mismatched_endpoint", f"url must be {endpoint}, the batch's endpoint"
    if not isinstance(line.get("body"), dict):
        return "invalid_body", "body must be a JSON object"
    if endpoint in _STREAMING and _is_true(line["body"].get("stream")):
        return "invalid_body", "body.stream must not be true"
    return None


def _is_true(value: Any) -> bool:
    try:
        return bool(_BOOLEAN.validate_python(value))
    except ValidationError:
        return False  # the call has the error


def _fault(name: str | None, number: int, code: str, message: str) -> LineFault:
    return LineFault(name, code, f"line {number}: {message}")


def answer_line(
    batch_id: str, number: int, name: str, *, status: int, request_id: str, body: bytes
) -> bytes:
    """Return the output line with a response or the error of a request."""
    response = {
        "status_code": status,
        "request_id": request_id,
        "body": msgspec.Raw(body),
    }
    return _line(batch_id, number, name, response, None)


def fault_line(batch_id: str, number: int, fault: LineFault) -> bytes:
    """Return the output line for an invalid line."""
    error = {"code": fault.code, "message": fault.message}
    return _line(batch_id, number, fault.custom_id, None, error)


def _line(
    batch_id: str,
    number: int,
    name: str | None,
    response: dict[str, Any] | None,
    error: dict[str, str] | None,
) -> bytes:
    named = f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
    fields = {"id": named, "custom_id": name, "response": response, "error": error}
    return msgspec.json.encode(fields) + b"\n"


def number_of(line: bytes) -> int | None:
    """Return the number of the input line that an output line belongs to; None for a torn line.

    Only the first field is read, which is the same in all output lines.
    """
    head, _, _ = line[:160].partition(b",")
    digits = head.rstrip(b'"').rpartition(b"_")[2]
    whole = line.startswith(b'{"id":"batch_req_') and line.endswith(b"}\n")
    return int(digits) if whole and digits.isdigit() else None
