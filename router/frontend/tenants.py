"""Endpoints ``/fleet/tenants`` for `baton tenants`: limits of tenants, and what is left of them.

GET    /fleet/tenants
PUT    /fleet/tenants/{tenant}   {"rpm", "keep_s", …}: those given; null: none
DELETE /fleet/tenants/{tenant}   limits, data and KV; the response is the receipt
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
from fastapi import Request
from pydantic import TypeAdapter, ValidationError

from baton.config.clients import Tenant
from baton.registry.redis_store import RegistryUnavailableError
from baton.registry.tenants.erasures import Erasures
from baton.types.errors import InvalidRequestError, UnavailableError
from baton.types.limits import Limits
from router.frontend.access import check_operator
from router.frontend.api.parts import Endpoints, RouterParts, read_body
from router.frontend.audited import audited
from router.frontend.deletion.command import delete_tenant
from router.routing.shares.limits_mirror import LimitsChangeError, LimitsMirror

_LOG = logging.getLogger(__name__)

_FIELDS = tuple(field.name for field in msgspec.structs.fields(Limits))
_TENANT: TypeAdapter[str] = TypeAdapter(Tenant)


def routes(
    router: RouterParts, mirror: LimitsMirror, erasures: Erasures | None = None
) -> Endpoints:
    """Return the endpoints of tenants' limits. All are for operators."""
    api = Endpoints()

    def check(request: Request) -> None:
        check_operator(request.headers, router.settings)

    async def change(tenant: str, given: dict[str, Any]) -> Limits:
        """Change the given limits of a tenant; return the new ones."""
        made: list[Limits] = []
        if not given:
            raise InvalidRequestError.at("limits", f"give some of {', '.join(_FIELDS)}")

        def edited(limits: Limits | None) -> Limits | None:
            before = msgspec.to_builtins(limits) if limits is not None else {}
            made.append(_limits_of({**before, **given}))
            return made[-1] if made[-1] != Limits() else None

        with _told():
            await mirror.change(tenant, edited)
            keep_s = made[-1].keep_s
            if keep_s is not None and router.stored_responses is not None:
                await router.stored_responses.shorten(tenant, keep_s)
        _LOG.info("changed limits of tenant=%s", tenant)
        return made[-1]

    @api.get("/fleet/tenants", include_in_schema=False)
    async def listed(request: Request) -> dict[str, Any]:
        """List the tenants that have limits."""
        check(request)
        tenants = mirror.table.tenants
        return {"tenants": [_shown(name, tenants[name]) for name in sorted(tenants)]}

    @api.put("/fleet/tenants/{tenant}", include_in_schema=False)
    async def set_limits(request: Request, tenant: str) -> dict[str, Any]:
        """Change limits of a tenant. Every router applies them within a second."""
        check(request)
        name = _checked(tenant)
        try:
            given = msgspec.json.decode(await read_body(request, router), type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise InvalidRequestError.at("body", str(error)) from error
        before = mirror.table.tenants.get(name)
        limits = await change(name, given)
        was = msgspec.to_builtins(before) if before is not None else None
        after = msgspec.to_builtins(limits)
        await audited(router, request, "tenants set", name, before=was, after=after)
        return _shown(name, limits)

    @api.delete("/fleet/tenants/{tenant}", include_in_schema=False)
    async def delete(request: Request, tenant: str) -> dict[str, Any]:
        """Delete a tenant's limits, data and KV, and return the receipt."""
        check(request)
        if erasures is None:
            raise UnavailableError("this router has no connection to the fleet's Redis")
        with _told():
            receipt = await delete_tenant(router, mirror, erasures, _checked(tenant))
        _LOG.info("deleted tenant=%s deletion=%s", tenant, receipt["deletion"])
        await audited(router, request, "tenants delete", tenant, after=receipt)
        return receipt

    return api


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
    except LimitsChangeError as error:
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
    fields: dict[str, Any] = msgspec.to_builtins(limits)
    return {"tenant": tenant, **fields}
