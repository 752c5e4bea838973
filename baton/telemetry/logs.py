"""Log format, with the ids of the request and trace that a line belongs to.

    set_up_logs("json")                                # once for each process
    with request_context("req-1", traceparent):        # this block and the tasks it starts
        _LOG.warning("a frame was refused")            # has request_id and trace_id

Text lines have the ids in brackets after the message. A JSON line is one object: ``time``,
``level``, ``logger``, ``message``, ``request_id``, ``trace_id``, ``client_request_id``,
``exc_info``, and the fields that the caller passes as ``extra``.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TextIO

from pythonjsonlogger.msgspec import MsgspecFormatter

from baton.printable import printable

LogFormat = Literal["text", "json"]

_ZERO_TRACE = "0" * 32


_NO_FIELDS: Mapping[str, str] = MappingProxyType({})


class _Ids(NamedTuple):
    request_id: str = ""
    trace_id: str = ""
    client_request_id: str = ""


_ids: ContextVar[_Ids] = ContextVar("baton_log_ids", default=_Ids())  # noqa: B039 - immutable


def set_up_logs(
    layout: LogFormat,
    stream: TextIO | None = None,
    *,
    before: str = "",
    fields: Mapping[str, str] = _NO_FIELDS,
) -> None:
    """Send this process's log to one stream, replacing any earlier configuration.

    Args:
        layout: Text, or one JSON object per line.
        stream: Standard error by default.
        before: Text before the level: the pid, where several processes share a file.
        fields: Fields of every JSON object, such as ``fleet`` and ``worker``.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(add_ids)
    handler.setFormatter(_JsonLines(fields) if layout == "json" else _TextLines(before))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


@contextmanager
def request_context(request_id: str, traceparent: str) -> Iterator[None]:
    """Mark log lines of this block, and of tasks started in it, with the ids of a request."""
    client_id = _ids.get().client_request_id
    token = _ids.set(_Ids(request_id, trace_id_of(traceparent), client_id))
    try:
        yield
    finally:
        _ids.reset(token)


@contextmanager
def client_context(client_request_id: str) -> Iterator[None]:
    """Mark log lines of this block with the request id that a client gave."""
    token = _ids.set(_ids.get()._replace(client_request_id=client_request_id))
    try:
        yield
    finally:
        _ids.reset(token)


def trace_id_of(traceparent: str) -> str:
    """Return the trace id of 32 hexadecimal digits, or ``""``."""
    parts = traceparent.split("-")
    trace_id = parts[1] if len(parts) >= 4 else ""
    is_hex = len(trace_id) == 32 and all(digit in "0123456789abcdef" for digit in trace_id)
    return trace_id if is_hex and trace_id != _ZERO_TRACE else ""


def add_ids(record: logging.LogRecord) -> bool:
    """Add the ids of the current request to a log record. Usable as a handler's filter."""
    for name, value in _ids.get()._asdict().items():
        if value and not hasattr(record, name):
            setattr(record, name, value)
    return True


class _TextLines(logging.Formatter):
    def __init__(self, before: str) -> None:
        super().__init__(f"%(asctime)s {before}%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        line = super().formatMessage(record)
        ids = [
            f"{name}={getattr(record, field)}"
            for name, field in (
                ("request", "request_id"),
                ("trace", "trace_id"),
                ("client", "client_request_id"),
            )
            if getattr(record, field, "")
        ]
        whole = f"{line} [{' '.join(ids)}]" if ids else line
        return printable(whole).replace("\n", "\\n")  # no text of others forges a line

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        return printable(super().formatException(ei))


class _JsonLines(MsgspecFormatter):
    def __init__(self, fields: Mapping[str, str]) -> None:
        super().__init__(
            ["time", "levelname", "name", "process", "message"],
            rename_fields={"levelname": "level", "name": "logger"},
            static_fields=dict(fields),
        )

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        record.time = at.isoformat(timespec="milliseconds")
        return super().format(record)
