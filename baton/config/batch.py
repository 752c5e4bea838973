"""What the fleet file says of files that clients leave here, and of the batches made of them."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_MIB = 1024 * 1024


class BatchConfig(BaseModel):
    """Limits of ``/v1/files`` and ``/v1/batches``. Files lie in the fleet's state folder.

    Attributes:
        max_file_bytes: Of one file that is sent.
        max_bytes_per_tenant: Of all that lies here of one tenant, answers included.
        max_bytes: Of all that lies here.
        at_once: Lines of all batches that run or wait at one time.
        keep_days: Then a file goes, and so does a batch that has ended.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    max_file_bytes: Annotated[int, Field(ge=1024, le=1024 * 1024 * _MIB)] = 100 * _MIB
    max_bytes_per_tenant: Annotated[int, Field(ge=1024, le=1024 * 1024 * _MIB)] = 1024 * _MIB
    max_bytes: Annotated[int, Field(ge=1024, le=1024 * 1024 * _MIB)] = 4096 * _MIB
    at_once: Annotated[int, Field(ge=1, le=4096)] = 8
    keep_days: Annotated[int, Field(ge=1, le=3650)] = 30
