"""One line of a batch's file: a request, or what is wrong with it; and the line that answers it."""

import hashlib
from typing import Any, NamedTuple

import orjson

MAX_CUSTOM_ID_CHARS = 512
LOWEST_PRIORITY = 2**31 - 1
"""A line's own ``priority`` is not looked at: batches are behind all others."""

_BOM = b"\xef\xbb\xbf"


class LineRequest(NamedTuple):
    """A request of a batch."""

    custom_id: str
    body: bytes


class LineFault(NamedTuple):
    """A line that cannot be sent.

    Attributes:
        custom_id: None where not even that could be read.
    """

    custom_id: str | None
    code: str
    message: str


def read_line(
    raw: bytes, number: int, endpoint: str, seen: set[bytes], max_bytes: int
) -> LineRequest | LineFault:
    """A line as a request.

    Args:
        raw: The line, longer than ``max_bytes`` if it was cut.
        number: From 1, for messages.
        endpoint: Of the batch, such as ``/v1/chat/completions``.
        seen: Digests of the names of the lines before; this one's is added.
        max_bytes: Of a line.
    """
    if len(raw) > max_bytes:
        return _fault(None, number, "line_too_long", f"it is longer than {max_bytes} bytes")
    try:
        line = orjson.loads(raw.removeprefix(_BOM) if number == 1 else raw)
    except orjson.JSONDecodeError as error:
        return _fault(None, number, "invalid_json_line", f"it is not valid JSON: {error}")
    if not isinstance(line, dict):
        return _fault(None, number, "invalid_json_line", "it is not a JSON object")
    name = line.get("custom_id")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_CUSTOM_ID_CHARS:
        return _fault(
            None,
            number,
            "invalid_custom_id",
            f"custom_id must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters",
        )
    fault = _wrong(line, endpoint)
    if fault is not None:
        return _fault(name, number, *fault)
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    if digest in seen:
        return _fault(name, number, "duplicate_custom_id", "an earlier line has its custom_id")
    try:
        body = orjson.dumps({**line["body"], "priority": LOWEST_PRIORITY})
    except TypeError as error:  # it reads deeper objects than it writes
        return _fault(name, number, "invalid_body", f"body: {error}")
    seen.add(digest)
    return LineRequest(name, body)


def _wrong(line: dict[str, Any], endpoint: str) -> tuple[str, str] | None:
    """What is wrong with a line that has a name: code and message."""
    if line.get("method", "POST") != "POST":
        return "invalid_method", "method must be POST"
    if line.get("url") != endpoint:
        return "mismatched_endpoint", f"url must be the batch's endpoint, {endpoint}"
    if not isinstance(line.get("body"), dict):
        return "invalid_body", "body must be a JSON object"
    if line["body"].get("stream"):
        return "invalid_body", "body.stream: a batch has no streams"
    return None


def _fault(name: str | None, number: int, code: str, message: str) -> LineFault:
    return LineFault(name, code, f"line {number}: {message}")


def answer_line(
    batch_id: str, number: int, name: str, *, status: int, request_id: str, body: bytes
) -> bytes:
    """The line that holds an answer, or the error that a request ended with."""
    response = {
        "status_code": status,
        "request_id": request_id,
        "body": orjson.Fragment(body),
    }
    return _line(batch_id, number, name, response, None)


def fault_line(batch_id: str, number: int, fault: LineFault) -> bytes:
    """The line that says why there is no answer."""
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
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)


def number_of(line: bytes) -> int | None:
    """Which line of the input this one answers; None for a torn one.

    Only its beginning is read: every line that was written has the same first field.
    """
    head, _, _ = line[:160].partition(b",")
    digits = head.rstrip(b'"').rpartition(b"_")[2]
    whole = line.startswith(b'{"id":"batch_req_') and line.endswith(b"}\n")
    return int(digits) if whole and digits.isdigit() else None
