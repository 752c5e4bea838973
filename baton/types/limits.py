"""Limits of a tenant, for all routers of a fleet together."""

from typing import Annotated

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000_000)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one tenant; None: no limit.

    Attributes:
        rpm: Requests per minute.
        tpm: Tokens per minute, of prompts and answers.
        tpd: Tokens per day (UTC).
        concurrent: Requests at the same time.
    """

    rpm: _Count | None = None
    tpm: _Count | None = None
    tpd: _Count | None = None
    concurrent: _Count | None = None
