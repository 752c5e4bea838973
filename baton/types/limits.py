"""Limits of a tenant, for all routers of a fleet together."""

from typing import Annotated

import msgspec

_Seconds = Annotated[int, msgspec.Meta(ge=0, le=1_000_000_000)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000_000)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one tenant; None: no limit.

    Attributes:
        rpm: Requests per minute.
        tpm: Tokens per minute, of prompts and answers.
        tpd: Tokens per day (UTC).
        concurrent: Requests at the same time.
        keep_s: Time that stored responses, files and batches are kept, if shorter than the
            fleet's; 0: none is stored.
        log_text: False: its texts are not logged, whatever its keys allow.
    """

    rpm: _Count | None = None
    tpm: _Count | None = None
    tpd: _Count | None = None
    concurrent: _Count | None = None
    keep_s: _Seconds | None = None
    log_text: bool | None = None
