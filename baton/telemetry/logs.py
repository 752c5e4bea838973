"""What a line of a log looks like, and which request and trace it belongs to.

    set_up_logs("json")                                # once for each process
    with request_context("req-1", traceparent):        # everything in it, and tasks that it begins
        _LOG.warning("a frame was refused")            # has request_id and trace_id

As text, the ids stand in brackets behind the message. As JSON, each line is one object: ``time``,
``level``, ``logger``, ``message``, ``request_id``, ``trace_id``, ``client_request_id``,
``exc_info``, and whatever the caller gave as ``extra``.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal, NamedTuple, TextIO

from pythonjsonlogger.orjson import OrjsonFormatter

LogFormat = Literal["text", "json"]

_ZERO_TRACE = "0" * 32


class _Ids(NamedTuple):
    request_id: str = ""
    trace_id: str = ""
    client_request_id: str = ""


_ids: ContextVar[_Ids] = ContextVar("baton_log_ids", default=_Ids())  # noqa: B039 - immutable


def set_up_logs(
    layout: LogFormat, stream: TextIO | None = None, *, before: str = "", level: int = logging.INFO
) -> None:
    """Send this process's log to one stream, in place of whatever was set up before.

    Args:
        layout: ``text`` or ``json``.
        stream: Standard error unless said.
        before: In text, stands before the level: the pid, where several processes share a file.
        level: What is less urgent is left out.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.addFilter(add_ids)
    handler.setFormatter(_JsonLines() if layout == "json" else _TextLines(before))
    logging.basicConfig(level=level, handlers=[handler], force=True)


@contextmanager
def request_context(request_id: str, traceparent: str) -> Iterator[None]:
    """Lines that are written inside, also by tasks begun there, belong to this request.

    Args:
        request_id: Of the request; ``""`` where there is none yet.
        traceparent: W3C; ``""`` or nonsense is no trace.
    """
    client_id = _ids.get().client_request_id
    token = _ids.set(_Ids(request_id, trace_id_of(traceparent), client_id))
    try:
        yield
    finally:
        _ids.reset(token)


@contextmanager
def client_context(client_request_id: str) -> Iterator[None]:
    """Lines that are written inside belong to the call that a client names so."""
    token = _ids.set(_ids.get()._replace(client_request_id=client_request_id))
    try:
        yield
    finally:
        _ids.reset(token)


def trace_id_of(traceparent: str) -> str:
    """The trace's id, 32 hexadecimal digits, or ``""``."""
    parts = traceparent.split("-")
    trace_id = parts[1] if len(parts) >= 4 else ""
    is_hex = len(trace_id) == 32 and all(digit in "0123456789abcdef" for digit in trace_id)
    return trace_id if is_hex and trace_id != _ZERO_TRACE else ""


def add_ids(record: logging.LogRecord) -> bool:
    """A filter of a handler: put the ids of the present request on the record."""
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
        return f"{line} [{' '.join(ids)}]" if ids else line


class _JsonLines(OrjsonFormatter):
    def __init__(self) -> None:
        super().__init__(
            ["time", "levelname", "name", "process", "message"],
            rename_fields={"levelname": "level", "name": "logger"},
        )

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        record.time = at.isoformat(timespec="milliseconds")
        return super().format(record)
