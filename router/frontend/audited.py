"""Entries of the audit log about calls."""

import contextlib
import ipaddress
from time import monotonic_ns
from typing import Any

from fastapi import Request

from baton.tenants.audit.chain import Entry
from router.process import Process


async def audited(
    router: Process,
    request: Request,
    verb: str,
    what: str = "",
    *,
    soon: bool = False,
    **states: Any,
) -> None:
    """Write an entry about a call that has changed something, with the ``states`` of `Entry`.

    ``soon``: do not wait for Redis.
    """
    if router.audit is not None:
        write = router.audit.write_soon if soon else router.audit.write
        who = router.access.name(request.headers)
        await write(Entry(verb=verb, what=what, who=who, source=source_of(request), **states))


def note_refused_login(router: Process, request: Request, reason: str) -> None:
    """Note a call that got 401."""
    call = f"{request.method} {request.url.path[:200]}"
    router.refused_logins.note(source_of(request), call, reason, monotonic_ns())


def source_of(request: Request) -> str:
    """Return the address of the caller; "unknown" if a proxy's header has none."""
    host = request.client.host if request.client is not None else ""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host)) if host else ""
    return "unknown"
