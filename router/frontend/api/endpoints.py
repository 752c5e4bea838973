"""Registration of endpoints, and reading of bodies.

Each file of endpoints has a function ``routes(router)`` that returns `Endpoints`; ``router/app.py``
lists these files.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, get_type_hints

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from baton.types.errors import (
    ClientClosedError,
    DeadlineError,
    InvalidRequestError,
    PayloadTooLargeError,
    SlowRequestError,
)
from router.frontend.http.encodings import Gunzip, utf8_of
from router.process import Process

_Handler = TypeVar("_Handler", bound=Callable[..., Any])


class Endpoints(APIRouter):
    """Endpoints of one file.

    Attributes:
        bodies: Classes of the bodies of `post_body` endpoints.
        direct: Those `post_body` endpoints that return a complete response, by path. They bypass
            FastAPI; its routes to the same endpoints serve as documentation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[type[BaseModel]] = []
        self.direct: dict[str, Callable[..., Any]] = {}

    def post_body(self, path: str, kind: type[BaseModel]) -> Callable[[_Handler], _Handler]:
        """Register a POST endpoint that reads a body of this ``kind`` with `read_body`."""
        self.bodies.append(kind)
        reference = {"$ref": f"#/components/schemas/{kind.__name__}"}
        content = {"application/json": {"schema": reference}}
        extra = {"requestBody": {"required": True, "content": content}}

        def documented(handler: _Handler) -> _Handler:
            if get_type_hints(handler).get("return") is Response:
                self.direct[path] = handler
            return self.post(path, openapi_extra=extra)(handler)

        return documented


async def read_body(request: Request, router: Process, *, deadline_s: float = 0.0) -> bytes:
    """Read a request's body within its limits of size and time; decompress it if necessary.

    Args:
        request: HTTP request.
        router: Process with the limits. The size limit applies to the decompressed body.
        deadline_s: Time limit of the request, if it includes reading the body; 0 = none.

    Raises:
        PayloadTooLargeError: The body is too large.
        UnsupportedMediaError: The compression is not supported.
        InvalidRequestError: The body is corrupt, or not UTF-8.
        SlowRequestError: Reading takes longer than ``clients.body_timeout_s``.
        DeadlineError: Reading takes longer than ``deadline_s``.
        ClientClosedError: The client disconnected before the end of the body.
    """
    settings = router.settings
    own_s = router.settings.clients.body_timeout_s
    limit_bytes = settings.max_body_bytes
    if declares_more(request, limit_bytes):
        raise _too_large(limit_bytes)
    decoder = Gunzip.of(request.headers.get("content-encoding", ""))
    body = bytearray()
    received_bytes = 0
    try:
        async with asyncio.timeout(min(own_s, deadline_s) if deadline_s else own_s):
            async for piece in request.stream():
                received_bytes += len(piece)
                if received_bytes > limit_bytes:
                    raise _too_large(limit_bytes)
                body += piece if decoder is None else decoder.feed(piece, limit_bytes - len(body))
                if len(body) > limit_bytes:
                    raise _too_large(limit_bytes)
    except ClientDisconnect as gone:
        raise ClientClosedError("the client disconnected while it sent the request") from gone
    except TimeoutError as late:
        router.metrics.inc("baton_client_timeouts", kind="body")
        if deadline_s and deadline_s < own_s:
            router.metrics.inc("baton_timeouts", phase="body")
            message = f"the body was not complete within {deadline_s:g} s (x-baton-timeout-ms)"
            raise DeadlineError(message, param="x-baton-timeout-ms") from late
        raise SlowRequestError(
            f"the body was not complete within {own_s:g} s (clients.body_timeout_s)"
        ) from late
    if decoder is not None:
        decoder.end()
    return utf8_of(bytes(body))


def declares_more(request: Request, limit_bytes: int) -> bool:
    """Return whether the header declares a larger body. Zeros may precede up to 20 digits."""
    declared = request.headers.get("content-length", "0")
    return declared.isdecimal() and int(declared[-20:]) > limit_bytes


def page_of(entries: Sequence[dict[str, Any]], limit: int, after: str) -> dict[str, Any]:
    """Return up to ``limit`` entries of a list after the entry ``after``, in OpenAI's format.

    Raises:
        InvalidRequestError: There is no entry ``after``.
    """
    names = [entry["id"] for entry in entries]
    if after and after not in names:
        raise InvalidRequestError.at("after", f"{after[:80]!r} does not exist")
    begin = names.index(after) + 1 if after else 0
    page = entries[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + limit < len(entries),
    }


def _too_large(limit_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the body is larger than {limit_bytes} bytes")
