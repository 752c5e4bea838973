"""What `/v1/files` and `/v1/batches` answer, for the description."""

from typing import Any, Literal

from pydantic import BaseModel

from router.frontend.batch.record import State


class FileObject(BaseModel):
    """A file that lies here."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str


class FileList(BaseModel):
    """Files, the newest first."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    """A file that is gone."""

    id: str
    object: Literal["file"]
    deleted: bool


class BatchCounts(BaseModel):
    """Lines of a batch."""

    total: int
    completed: int
    failed: int


class Batch(BaseModel):
    """Many requests, for later."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: str
    status: State
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(BaseModel):
    """Batches, the newest first."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
