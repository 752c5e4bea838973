"""Endpoints ``/v1/files`` and ``/v1/batches``. Each tenant sees only its own files and batches."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi import HTTPException, Query, Request
from fastapi.responses import FileResponse
from pydantic import Field, StringConstraints
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from baton.config.clients import ClientLimitsConfig
from baton.types.errors import InvalidRequestError, NotKeptError, UnavailableError
from router.frontend.api.bodies.common import Body, NonEmpty
from router.frontend.api.bodies.parse import parse
from router.frontend.api.call_headers import ignored_of
from router.frontend.api.endpoints import Endpoints, page_of, read_body
from router.frontend.batch.record import BatchRecord
from router.frontend.batch.store import LOCK, MAX_FILES, BatchStore, FileRecord
from router.frontend.batch.uploads import no_room, read_upload
from router.frontend.off_loop import off_loop
from router.process import Process
from router.routing.checks.fair_limit import FairLimit

_LONG_S = 10**9  # the store has its own limit
_HOUR_S = 3600
_UPLOADS = 8
_UPLOADS_OF_A_TENANT = 2

_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}

_Name = Annotated[str, StringConstraints(max_length=64)]
_Label = Annotated[str, StringConstraints(max_length=512)]
_Limit = Annotated[int, Query(ge=1, le=10_000)]
_Record = TypeVar("_Record", FileRecord, BatchRecord)
_Written = TypeVar("_Written")

Endpoint = Literal[
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
]


class BatchBody(Body):
    """Request body of ``POST /v1/batches``. Each line of the file is a request to ``endpoint``."""

    input_file_id: NonEmpty
    """id of a file that was uploaded with purpose batch"""
    endpoint: Endpoint
    """endpoint of all lines"""
    completion_window: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,2}h$")] = "24h"
    """1h to 999h"""
    metadata: Annotated[dict[_Name, _Label], Field(max_length=16)] | None = None
    """up to 16 texts, repeated in the batch"""

    accepted: ClassVar[dict[str, str]] = {
        "output_expires_after": "output files are kept for clients.batch.keep_days"
    }

    @property
    def window_s(self) -> int:
        """Seconds after which the remaining lines are abandoned."""
        return int(self.completion_window.removesuffix("h")) * _HOUR_S


def store_of(router: Process) -> BatchStore | None:
    """Return the store of files and batches; None if the router has no state folder."""
    settings = router.settings
    if not settings.state_dir:
        return None
    return BatchStore(
        Path(settings.state_dir) / "batch",
        settings.clients.batch,
        lambda tenant: router.policies.of(tenant).keep_s,
    )


class _Content(FileResponse):
    """Content of a file, which is sent to its end even if it is deleted meanwhile."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the content, or raise HTTPException."""

        async def checked(message: Message) -> None:
            if message.get("status", 0) >= 400:  # a plain text, so far
                kept = Headers(raw=message["headers"]).get("content-range")
                more = {"content-range": kept} if kept else None
                raise HTTPException(416, "range: must be `bytes=FIRST-LAST` within the file", more)
            await send(message)

        try:
            file = await asyncio.to_thread(open, self.path, "rb")
        except FileNotFoundError:
            raise _unknown(Path(self.path).stem) from None
        with file:
            self.path = f"/proc/self/fd/{file.fileno()}"  # is opened again for the body
            await super().__call__(scope, receive, checked)


_Find = Callable[[Request], tuple[BatchStore, str]]
"""Returns the store and the tenant of a call."""


def routes(router: Process) -> Endpoints:
    """Return the endpoints of files and batches."""
    api = Endpoints()
    store = store_of(router)

    def of(request: Request) -> tuple[BatchStore, str]:
        tenant = router.access.tenant(request.headers)
        if store is None:
            raise UnavailableError("files need a state folder, which this router does not have")
        if tenant == LOCK:
            raise InvalidRequestError.at(
                "x-baton-tenant", f"{tenant!r} is a reserved name and cannot have files"
            )
        return store, tenant

    _add_uploads(api, router.settings.clients, of)
    _add_files(api, of)
    _add_batches(api, router, of)
    return api


def _add_uploads(api: Endpoints, clients: ClientLimitsConfig, of: _Find) -> None:
    # Uploads occupy the system's folder for temporary files; slow ones must not block others.
    limit = FairLimit(_UPLOADS, "uploads", _UPLOADS_OF_A_TENANT)

    @api.post("/v1/files", openapi_extra=_FORM)
    async def upload(request: Request) -> dict[str, Any]:
        """Upload a file as a form with the fields ``file`` and ``purpose`` (``batch``)."""
        store, tenant = of(request)
        _check_kept(store, tenant)
        # Checked before reading, so that clients without space need not send the whole file.
        await asyncio.to_thread(store.check_room, tenant, 1)
        sent = await read_upload(request, clients, limit, tenant)
        try:
            keep_s = _LONG_S if sent.keep_s is None else sent.keep_s
            record = await _stored(
                store.add_file,
                tenant,
                sent.file.file,
                sent.filename,
                sent.purpose,
                time.time(),
                keep_s,
            )
        finally:
            await sent.form.close()
        return record.shown()


def _add_files(api: Endpoints, of: _Find) -> None:
    @api.get("/v1/files")
    async def files(
        request: Request,
        limit: _Limit = MAX_FILES,
        after: str = "",
        purpose: str = "",
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        """List the tenant's files, newest first."""
        store, tenant = of(request)
        records = await asyncio.to_thread(store.files, tenant)
        if purpose:
            records = [record for record in records if record.purpose == purpose]
        return _page(records if order == "desc" else records[::-1], limit, after)

    @api.get("/v1/files/{file_id}")
    async def file(request: Request, file_id: str) -> dict[str, Any]:
        """Return the metadata of a file."""
        store, tenant = of(request)
        return _known(await asyncio.to_thread(store.file, tenant, file_id), file_id).shown()

    @api.get("/v1/files/{file_id}/content")
    async def content(request: Request, file_id: str) -> _Content:
        """Return the content of a file."""
        store, tenant = of(request)
        _known(await asyncio.to_thread(store.file, tenant, file_id), file_id)
        path = store.data_path(tenant, file_id)
        return _Content(path, media_type="application/octet-stream")

    @api.delete("/v1/files/{file_id}")
    async def delete(request: Request, file_id: str) -> dict[str, Any]:
        """Delete a stored file."""
        store, tenant = of(request)
        if not await asyncio.to_thread(store.delete_file, tenant, file_id):
            raise _unknown(file_id)
        return {"id": file_id, "object": "file", "deleted": True}


def _add_batches(api: Endpoints, router: Process, of: _Find) -> None:
    @api.post_body("/v1/batches", BatchBody)
    async def create(request: Request) -> dict[str, Any]:
        """Create a batch, which runs each line of a file as a request at the lowest priority."""
        store, tenant = of(request)
        _check_kept(store, tenant)
        raw = await read_body(request, router)
        ignored = ignored_of(request)
        body = await off_loop(len(raw), lambda: parse(BatchBody, raw, ignored))
        if await asyncio.to_thread(store.file, tenant, body.input_file_id) is None:
            raise InvalidRequestError.at(
                "input_file_id", f"file {body.input_file_id[:80]!r} does not exist"
            )
        if len(await asyncio.to_thread(store.batches, tenant)) >= MAX_FILES:
            raise InvalidRequestError(
                f"this tenant has {MAX_FILES} batches, the limit; old ones are removed after "
                f"{store.limits.keep_days} days"
            )
        now_s = int(time.time())
        record = BatchRecord(
            id=f"batch_{secrets.token_hex(16)}",
            tenant=tenant,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_s=now_s,
            expires_s=now_s + body.window_s,
            metadata=body.metadata,
        )
        await _stored(store.save, record)
        return record.shown()

    @api.get("/v1/batches")
    async def batches(request: Request, limit: _Limit = 20, after: str = "") -> dict[str, Any]:
        """List the tenant's batches, newest first."""
        store, tenant = of(request)
        return _page(await asyncio.to_thread(store.batches, tenant), limit, after)

    @api.get("/v1/batches/{batch_id}")
    async def batch(request: Request, batch_id: str) -> dict[str, Any]:
        """Return the state of a batch."""
        store, tenant = of(request)
        return _known(await asyncio.to_thread(store.batch, tenant, batch_id), batch_id).shown()

    @api.post("/v1/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> dict[str, Any]:
        """Cancel a batch. Its output so far is kept."""
        store, tenant = of(request)
        record = _known(await asyncio.to_thread(store.batch, tenant, batch_id), batch_id)
        if record.ended:
            raise InvalidRequestError.at(
                "batch_id", f"the batch has already ended ({record.state})"
            )
        await _stored(store.ask_to_cancel, record)
        record.cancel(time.time())  # the router that runs it will store the same state
        return record.shown()


async def _stored(write: Callable[..., _Written], *values: Any) -> _Written:
    """Call a function that writes to the disk, in a thread."""
    try:
        return await asyncio.to_thread(write, *values)
    except OSError as error:
        raise no_room(error) from error


def _check_kept(store: BatchStore, tenant: str) -> None:
    if not store.keep_s(tenant):
        raise NotKeptError("the policy of this tenant stores no files or batches (keep_s: 0)")


def _known(record: _Record | None, record_id: str) -> _Record:
    if record is None:
        raise _unknown(record_id)
    return record


def _unknown(record_id: str) -> HTTPException:
    return HTTPException(404, f"{record_id[:80]!r} does not exist")


def _page(
    records: Sequence[FileRecord] | Sequence[BatchRecord], limit: int, after: str
) -> dict[str, Any]:
    return page_of([record.shown() for record in records], limit, after)
