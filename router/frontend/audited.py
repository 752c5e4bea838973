"""Entries of the audit log about calls."""

from time import monotonic_ns
from typing import Protocol

from fastapi import Request

from baton.tenants.audit.log import AuditLog
from baton.tenants.audit.refused_logins import RefusedLogins
from router.tenants.access import AccessControl


class _Parts(Protocol):
    """Parts of a router that this file uses."""

    @property
    def access(self) -> AccessControl: ...
    @property
    def audit(self) -> AuditLog | None: ...
    @property
    def refused_logins(self) -> RefusedLogins: ...


async def audited(
    router: _Parts,
    request: Request,
    verb: str,
    what: str = "",
    *,
    before: object = None,
    after: object = None,
    wait: bool = True,
) -> None:
    """Write an entry about a call that has changed something; ``wait`` as `AuditLog.record`."""
    if router.audit is not None:
        await router.audit.record(
            verb,
            what,
            who=router.access.name(request.headers),
            source=source_of(request),
            before=before,
            after=after,
            wait=wait,
        )


def note_refused_login(router: _Parts, request: Request, reason: str) -> None:
    """Note a call that got 401."""
    call = f"{request.method} {request.url.path[:200]}"
    router.refused_logins.note(source_of(request), call, reason, monotonic_ns())


def source_of(request: Request) -> str:
    """Return the address of the caller."""
    return request.client.host if request.client is not None else ""
