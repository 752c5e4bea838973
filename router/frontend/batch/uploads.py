"""Uploads of files as multipart forms, which are written to the disk piece by piece."""

import asyncio
import errno
import re
from collections.abc import AsyncGenerator
from typing import NamedTuple

from fastapi import Request
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from baton.config.clients import ClientLimitsConfig
from baton.types.errors import (
    ClientClosedError,
    InvalidRequestError,
    PayloadTooLargeError,
    SlowRequestError,
    UnsupportedMediaError,
)
from router.frontend.api.endpoints import declares_more
from router.routing.checks.fair_limit import FairLimit

_FORM_BYTES = 64 * 1024  # for the form's content besides the file
_MAX_FIELDS = 16
_MAX_NAME_CHARS = 256
_SECONDS = re.compile(r"[0-9]{1,9}")
_CHARSETS = (b"utf-8", b"utf8", b"us-ascii")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Upload(NamedTuple):
    """An uploaded file; the form may specify the time to keep it."""

    form: FormData
    file: UploadFile
    filename: str
    purpose: str
    keep_s: int | None


async def read_upload(
    request: Request, limits: ClientLimitsConfig, places: FairLimit, tenant: str
) -> Upload:
    """Read a form's file and fields; the caller closes ``form``.

    Raises:
        UnsupportedMediaError: The body is not a multipart form in UTF-8.
        PayloadTooLargeError: The file is larger than ``clients.batch.max_file_bytes``.
        SlowRequestError: The upload takes longer than ``clients.body_timeout_s``.
        InvalidRequestError: The form is invalid, or a field is missing.
        ClientClosedError: The client has disconnected.
    """
    kind = request.headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise UnsupportedMediaError.at("content-type", "must be multipart/form-data")
    # Python has codecs that decode 1 MB in 20 s, on the event loop here.
    if parse_options_header(kind)[1].get(b"charset", b"utf-8").lower() not in _CHARSETS:
        raise UnsupportedMediaError.at("content-type", "the charset of a form must be utf-8")
    limit_bytes = limits.batch.max_file_bytes
    if declares_more(request, limit_bytes + _FORM_BYTES):
        raise _too_large(limit_bytes)
    stream = _bounded(request, limit_bytes)
    parser = MultiPartParser(request.headers, stream, max_files=1, max_fields=_MAX_FIELDS)
    try:
        async with asyncio.timeout(limits.body_timeout_s), places.place(tenant):
            form = await parser.parse()
    except MultiPartException as error:
        raise InvalidRequestError(f"the form is invalid: {error.message}") from error
    except (LookupError, ValueError) as error:  # a missing name, or no UTF-8
        raise InvalidRequestError(f"the form is invalid: {error!r}") from error
    except ClientDisconnect as gone:
        raise ClientClosedError("the client disconnected while it sent the file") from gone
    except TimeoutError as late:
        message = (
            f"the file was not complete within {limits.body_timeout_s:g} s (clients.body_timeout_s)"
        )
        raise SlowRequestError(message) from late
    except OSError as error:  # of the folder of temporary files
        raise no_room(error) from error
    try:
        return _checked(form, limit_bytes)
    except BaseException:
        await form.close()
        raise


async def _bounded(request: Request, limit_bytes: int) -> AsyncGenerator[bytes, None]:
    received_bytes = 0
    async for piece in request.stream():
        received_bytes += len(piece)
        if received_bytes > limit_bytes + _FORM_BYTES:
            raise _too_large(limit_bytes)
        yield piece


def _checked(form: FormData, limit_bytes: int) -> Upload:
    file = form.get("file")
    purpose = form.get("purpose")
    if not isinstance(file, UploadFile):
        raise InvalidRequestError.at("file", "is required")
    if purpose != "batch":
        raise InvalidRequestError.at("purpose", f"must be batch (got {str(purpose)[:40]!r})")
    if (file.size or 0) > limit_bytes:
        raise _too_large(limit_bytes)
    keep = form.get("expires_after[seconds]")
    if keep is not None and not (isinstance(keep, str) and _SECONDS.fullmatch(keep)):
        raise InvalidRequestError.at("expires_after[seconds]", "must be an integer")
    name = (file.filename or "file.jsonl")[:_MAX_NAME_CHARS]
    return Upload(form, file, name, purpose, int(keep) if isinstance(keep, str) else None)


def no_room(error: OSError) -> Exception:
    """Return the error for a client whose file or batch does not fit on the disk, or ``error``."""
    if error.errno not in _FULL:
        return error
    return PayloadTooLargeError(
        f"the router's disk has no room: {error.strerror}; delete files, or retry later"
    )


def _too_large(limit_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the file is larger than {limit_bytes} bytes (clients.batch.max_file_bytes)", param="file"
    )
