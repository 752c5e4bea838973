"""Endpoints ``/fleet/tenants`` for `baton tenants`: limits of tenants, and what is left of them.

GET    /fleet/tenants            a tenant sees itself
PUT    /fleet/tenants/{tenant}   fields of `Limits`: those given; null: none
DELETE /fleet/tenants/{tenant}   limits, data and KV; the response is the receipt
"""

import contextlib
import logging
import re
from collections.abc import Iterator
from time import monotonic_ns
from typing import Annotated, Any

import msgspec
from fastapi import Query, Request
from pydantic import TypeAdapter, ValidationError

from baton.config.clients import Tenant
from baton.registry.redis_store import RegistryUnavailableError
from baton.tenants.limits import Limits
from baton.types.errors import InvalidRequestError, UnavailableError
from baton.types.versioned import TableChangeError
from router.frontend.api.bodies.parse import decoded
from router.frontend.api.endpoints import Endpoints, read_body
from router.frontend.audited import audited
from router.frontend.operators.deletion.command import delete_tenant
from router.process import Process
from router.tenants.access import Access
from router.tenants.limits_table import SyncedLimits

_LOG = logging.getLogger(__name__)

_FIELDS = tuple(field.name for field in msgspec.structs.fields(Limits))
_MOST_WATCHED = 100
_NO_REDIS = "this router has no connection to the fleet's Redis"

_TENANT: TypeAdapter[str] = TypeAdapter(Tenant)


def routes(router: Process) -> Endpoints:
    """Return the endpoints of tenants' limits. Changes are for operators."""
    api = Endpoints()

    def check(request: Request) -> None:
        router.access.check_change(request.headers)

    @api.get("/fleet/tenants", include_in_schema=False)
    async def listed(
        request: Request, limit: Annotated[int | None, Query(ge=1, le=_MOST_WATCHED)] = None
    ) -> dict[str, Any]:
        """List the tenants that have limits, in natural order.

        With ``limit``, the answer has their use, which is current from the second call on.
        """
        return _list(router, router.access.of(request.headers), limit)

    @api.put("/fleet/tenants/{tenant}", include_in_schema=False)
    async def set_limits(request: Request, tenant: str) -> dict[str, Any]:
        """Change limits of a tenant. Every router applies them within a second."""
        check(request)
        name = _checked(tenant)
        given = decoded(await read_body(request, router))
        synced = router.limits
        if synced is None:
            raise UnavailableError(_NO_REDIS)
        before = synced.table.tenants.get(name)
        limits = await _change(router, given, name, synced)
        was = msgspec.to_builtins(before) if before is not None else None
        after = msgspec.to_builtins(limits)
        await audited(router, request, "tenants set", name, before=was, after=after)
        return _shown(name, limits)

    @api.delete("/fleet/tenants/{tenant}", include_in_schema=False)
    async def delete(request: Request, tenant: str) -> dict[str, Any]:
        """Delete a tenant's limits, data and KV, and return the receipt."""
        check(request)
        synced = router.limits
        if synced is None or router.sources is None:
            raise UnavailableError(_NO_REDIS)
        with _told():
            receipt = await delete_tenant(router, router.sources, synced, _checked(tenant))
        _LOG.info("deleted tenant=%s deletion=%s", tenant, receipt["deletion"])
        await audited(router, request, "tenants delete", tenant, after=receipt)
        return receipt

    return api


async def _change(
    router: Process, given: dict[str, Any], tenant: str, synced: SyncedLimits
) -> Limits:
    """Change the given limits of a tenant; return the new ones."""
    made: list[Limits] = []
    if not given:
        raise InvalidRequestError.at("limits", f"give some of {', '.join(_FIELDS)}")

    def edited(limits: Limits | None) -> Limits | None:
        before = msgspec.to_builtins(limits) if limits is not None else {}
        made.append(_limits_of(_merged(before, given)))
        return made[-1] if made[-1] != Limits() else None

    with _told():
        await synced.change_tenant(tenant, edited)
        keep_s = made[-1].keep_s
        if keep_s is not None and router.sources is not None:
            await router.sources.responses.shorten(tenant, keep_s)
    _LOG.info("changed limits of tenant=%s", tenant)
    return made[-1]


def _list(router: Process, access: Access, limit: int | None) -> dict[str, Any]:
    tenants = router.policies.all
    names = sorted(tenants, key=_natural) if access.operator else [access.tenant]
    names = [name for name in names if name in tenants]
    shown = [_shown(name, tenants[name]) for name in names[:limit]]
    if limit is not None:
        now_ns = monotonic_ns()
        quotas = router.quotas.quotas
        quotas.watch(names[:limit], now_ns)
        for row in shown:
            standings = quotas.standing(row["tenant"], now_ns)
            row["used"] = {kind: standing.used for kind, standing in standings.items()}
    source = router.policies.file
    is_shown = access.operator and source is not None and source.is_used
    return {
        "total": len(names),
        "file": str(source.file) if source is not None and is_shown else None,
        "tenants": shown,
    }


def _natural(name: str) -> list[str | int]:
    """Return a key that sorts ``team-9`` before ``team-10``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]


def _merged(before: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a policy after a change; one of ``slo``'s latencies may be given."""
    slo = given.get("slo")
    if isinstance(slo, dict):
        given = {**given, "slo": {**before.get("slo", {}), **slo}}
    return {**before, **given}


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Convert errors of a change to those of the API."""
    try:
        yield
    except RegistryUnavailableError as error:
        raise UnavailableError(
            "the fleet's Redis is unavailable, so routers keep the last known limits; repeat "
            "the command when it answers"
        ) from error
    except TableChangeError as error:
        raise InvalidRequestError(str(error)) from error


def _checked(tenant: str) -> str:
    try:
        return _TENANT.validate_python(tenant)
    except ValidationError as error:
        message = "must be 1 to 64 characters of letters, digits, '_', '.' and '-'"
        raise InvalidRequestError.at("tenant", message) from error


def _limits_of(fields: dict[str, Any]) -> Limits:
    try:
        return msgspec.convert(fields, Limits)
    except msgspec.ValidationError as error:
        raise InvalidRequestError.at("limits", str(error)) from error


def _shown(tenant: str, limits: Limits) -> dict[str, Any]:
    return {"tenant": tenant, **limits.fields()}
