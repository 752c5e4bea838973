"""Fleet file section on files that clients upload, and on batches of requests."""

from typing import Annotated

from pydantic import Field

from baton.config.section import Section

_MIB = 1024 * 1024


class BatchConfig(Section):
    """Limits of ``/v1/files`` and ``/v1/batches``. Files are in the fleet's state folder.

    Attributes:
        max_file_bytes: Size limit of one uploaded file.
        max_bytes_per_tenant: Size limit of all files of one tenant, results included.
        max_bytes: Size limit of all files.
        at_once: Lines of all batches that run or wait at one time.
        keep_days: Days until a file or a finished batch is deleted.
    """

    max_file_bytes: Annotated[int, Field(ge=1024, le=1024 * 1024 * _MIB)] = 100 * _MIB
    max_bytes_per_tenant: Annotated[int, Field(ge=1024, le=1024 * 1024 * _MIB)] = 1024 * _MIB
    max_bytes: Annotated[int, Field(ge=1024, le=1024 * 1024 * _MIB)] = 4096 * _MIB
    at_once: Annotated[int, Field(ge=1, le=4096)] = 8
    keep_days: Annotated[int, Field(ge=1, le=3650)] = 30
