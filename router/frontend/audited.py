"""Entries of the audit log about calls."""

import contextlib
import ipaddress
from time import monotonic_ns

from fastapi import Request

from baton.tenants.audit.file import entry
from router.process import Process


async def audited(
    router: Process,
    request: Request,
    verb: str,
    what: str = "",
    *,
    before: object = None,
    after: object = None,
) -> None:
    """Write an entry about a call that has changed something."""
    if router.audit is not None:
        who = router.access.name(request.headers)
        source = source_of(request)
        await router.audit.record(verb, what, who=who, source=source, before=before, after=after)


async def audited_soon(
    router: Process, request: Request, verb: str, what: str, after: object
) -> None:
    """Write an entry about a call, but do not wait for Redis."""
    if router.audit is not None:
        who = router.access.name(request.headers)
        made = entry(verb, what, who=who, source=source_of(request), after=after)
        await router.audit.write_soon(made)


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
