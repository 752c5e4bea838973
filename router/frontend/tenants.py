"""Endpoints ``/fleet/tenants`` for `baton tenants`: limits of tenants, and what is left of them.

GET    /fleet/tenants            a tenant sees itself
PUT    /fleet/tenants/{tenant}   fields of `Limits`: those given; null: none
DELETE /fleet/tenants/{tenant}
"""

import logging
import re
from time import monotonic_ns
from typing import Annotated, Any

import msgspec
from fastapi import HTTPException, Query, Request
from pydantic import TypeAdapter, ValidationError

from baton.config.clients import Tenant
from baton.registry.redis_store import RegistryUnavailableError
from baton.types.errors import InvalidRequestError, UnavailableError
from baton.types.limits import Limits
from router.frontend.access import access_of, check_operator
from router.frontend.api.parts import Endpoints, RouterParts, read_body
from router.routing.shares.limits_mirror import LimitsChangeError, LimitsMirror

_LOG = logging.getLogger(__name__)

_MOST_WATCHED = 100

_TENANT: TypeAdapter[str] = TypeAdapter(Tenant)


def routes(router: RouterParts, mirror: LimitsMirror | None) -> Endpoints:
    """Return the endpoints of tenants' limits. Changes are for operators."""
    api = Endpoints()

    def check(request: Request) -> None:
        check_operator(request.headers, router.settings)

    async def change(tenant: str, given: dict[str, Any] | None) -> Limits | None:
        """Change the given limits of a tenant, or remove all; return the new ones."""
        made: list[Limits | None] = []
        if mirror is None:
            raise UnavailableError("this router has no Redis, so no tenant has limits")

        def edited(limits: Limits | None) -> Limits | None:
            if given is None:
                if limits is None:
                    raise HTTPException(404, f"tenant {tenant} has no limits")
                new = None
            else:
                before = msgspec.to_builtins(limits) if limits is not None else {}
                new = _limits_of(_merged(before, given))
            made.append(new)
            return new

        try:
            await mirror.change(tenant, edited)
        except RegistryUnavailableError as error:
            raise UnavailableError(
                "the fleet's Redis is unavailable, so routers keep the last known limits; repeat "
                "the command when it answers"
            ) from error
        except LimitsChangeError as error:
            raise InvalidRequestError(str(error)) from error
        _LOG.info("changed limits of tenant=%s", tenant)
        return made[-1]

    @api.get("/fleet/tenants", include_in_schema=False)
    async def listed(
        request: Request, limit: Annotated[int | None, Query(ge=1, le=_MOST_WATCHED)] = None
    ) -> dict[str, Any]:
        """List the tenants that have limits, in natural order.

        With ``limit``, the answer has their use, which is current from the second call on.
        """
        access = access_of(request.headers, router.settings)
        tenants = router.settings.policies.all
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
        source = router.settings.tenants_file
        is_shown = access.operator and source is not None and source.is_used
        return {
            "total": len(names),
            "file": str(source.file) if source is not None and is_shown else None,
            "tenants": shown,
        }

    @api.put("/fleet/tenants/{tenant}", include_in_schema=False)
    async def set_limits(request: Request, tenant: str) -> dict[str, Any]:
        """Change limits of a tenant. Every router applies them within a second."""
        check(request)
        try:
            name = _TENANT.validate_python(tenant)
            given = msgspec.json.decode(await read_body(request, router), type=dict[str, Any])
        except ValidationError as error:
            message = "must be 1 to 64 characters of letters, digits, '_', '.' and '-'"
            raise InvalidRequestError.at("tenant", message) from error
        except msgspec.DecodeError as error:
            raise InvalidRequestError.at("body", str(error)) from error
        limits = await change(name, given)
        return _shown(name, limits or Limits())

    @api.delete("/fleet/tenants/{tenant}", include_in_schema=False)
    async def delete(request: Request, tenant: str) -> dict[str, Any]:
        """Remove all limits of a tenant."""
        check(request)
        await change(tenant, None)
        return _shown(tenant, Limits())

    return api


def _natural(name: str) -> list[str | int]:
    """Return a key that sorts ``team-9`` before ``team-10``."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]


def _merged(before: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a policy after a change; one of ``slo``'s latencies may be given."""
    slo = given.get("slo")
    if isinstance(slo, dict):
        given = {**given, "slo": {**before.get("slo", {}), **slo}}
    return {**before, **given}


def _limits_of(fields: dict[str, Any]) -> Limits:
    try:
        limits = msgspec.convert(fields, Limits)
    except msgspec.ValidationError as error:
        raise InvalidRequestError.at("limits", str(error)) from error
    if limits == Limits():
        raise InvalidRequestError.at(
            "limits", "the tenant would have none; give one, or delete the tenant"
        )
    return limits


def _shown(tenant: str, limits: Limits) -> dict[str, Any]:
    return {"tenant": tenant, **limits.fields()}
