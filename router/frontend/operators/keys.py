"""Endpoints ``/fleet/keys`` for `baton keys`: issue, list, rotate and revoke API keys.

    POST   /fleet/keys               {"keys": [{"id", "sha256", "rights", "expires_s"}]}
    GET    /fleet/keys
    POST   /fleet/keys/{id}/rotate   {"id", "sha256", "expires_s", "overlap_s"}
    DELETE /fleet/keys/{id}

The caller makes the key and sends its SHA-256, so that no router and no log ever has an issued
secret.
"""

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from fastapi import HTTPException, Request
from pydantic import Field

from baton.config.clients import ApiKeyConfig
from baton.registry.redis_store import RegistryUnavailableError
from baton.tenants.key_record import KeyRecord
from baton.types.errors import InvalidRequestError, UnavailableError
from router.frontend.api.bodies.common import OperatorBody
from router.frontend.api.bodies.parse import parse_operators
from router.frontend.api.endpoints import Endpoints, read_body
from router.frontend.audited import audited
from router.frontend.group.siblings import OWN_ANSWER
from router.process import Process
from router.tenants.key_exchange import (
    KeyChangeError,
    KeyExchange,
    UnconfirmedChangeError,
    UnknownKeyError,
)
from router.tenants.key_table import DAY_MS, IssuedKey

_LOG = logging.getLogger(__name__)

_MOST_AT_ONCE = 1000
_LONGEST_S = 100 * 366 * 24 * 3600

_Id = Annotated[str, Field(pattern=r"^[a-z0-9]{12}$")]
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Lifetime = Annotated[float, Field(gt=0, le=_LONGEST_S)]


class _NewKey(OperatorBody):
    id: _Id
    sha256: _Hash
    rights: ApiKeyConfig
    expires_s: _Lifetime | None = None
    by_hash: bool = False


class _NewKeys(OperatorBody):
    keys: Annotated[list[_NewKey], Field(min_length=1, max_length=_MOST_AT_ONCE)]


class _Successor(OperatorBody):
    id: _Id
    sha256: _Hash
    expires_s: _Lifetime | None = None
    overlap_s: Annotated[float, Field(ge=0, le=_LONGEST_S)]


_Check = Callable[[Request], None]
"""Refuses a call that is not an operator's."""


def routes(router: Process, keys: KeyExchange) -> Endpoints:
    """Return the endpoints of issued API keys. All are for operators."""
    api = Endpoints()

    def check(request: Request) -> None:
        router.access.check_operator(request.headers)
        if not router.access.needs_key:
            raise InvalidRequestError(
                "this fleet checks no API keys; set `clients: {api_keys_file: redis}`, or "
                "`api_keys`, in the fleet file"
            )

    _add_issue(api, router, keys, check)
    _add_ends(api, router, keys, check)
    return api


def _add_issue(api: Endpoints, router: Process, keys: KeyExchange, check: _Check) -> None:
    @api.get("/fleet/keys", include_in_schema=False)
    async def listed(request: Request) -> dict[str, Any]:
        """List the keys, without hashes, and the age of this list."""
        check(request)
        used = await keys.used()
        compared_s = keys.table.compared_s
        now_ms = _now_ms()
        return {
            "age_s": None if compared_s is None else time.monotonic() - compared_s,
            "keys": [_shown(key, now_ms, used.get(key.record.id, 0)) for key in keys.table],
        }

    @api.post("/fleet/keys", include_in_schema=False)
    async def create(request: Request) -> dict[str, Any]:
        """Issue keys. Those that exist with the same rights are left as they are."""
        check(request)
        body = parse_operators(_NewKeys, await read_body(request, router))
        now_ms = _now_ms()
        for new in body.keys:
            _check_rights(new.rights, router)
        try:
            added = await keys.add([_record_of(new, now_ms) for new in body.keys])
        except (RegistryUnavailableError, KeyChangeError) as error:
            raise _refusal(error) from error
        _LOG.info("issued API keys=%d first=%s", added, body.keys[0].id)
        verb = "keys import" if any(new.by_hash for new in body.keys) else "keys create"
        for new in body.keys:
            rights = new.rights.model_dump(mode="json", exclude_defaults=True)
            after = {**rights, "expires_s": new.expires_s}
            await audited(router, request, verb, new.id, after=after)
        known = [keys.table.get(new.id) for new in body.keys]
        return {
            "added": added,
            "keys": [_shown(key, now_ms) for key in known if key is not None],
        }


def _add_ends(api: Endpoints, router: Process, keys: KeyExchange, check: _Check) -> None:
    @api.post("/fleet/keys/{key_id}/rotate", include_in_schema=False)
    async def rotate(request: Request, key_id: str) -> dict[str, Any]:
        """Issue a key with the rights of another one, which expires after the overlap."""
        check(request)
        body = parse_operators(_Successor, await read_body(request, router))
        now_ms = _now_ms()
        try:
            old = await keys.change(
                key_id,
                lambda old: _retired(old, body, now_ms),
                lambda old: _successor(old, body, now_ms),
            )
        except (RegistryUnavailableError, KeyChangeError) as error:
            raise _refusal(error) from error
        _LOG.info("rotated API key=%s successor=%s", key_id, body.id)
        after = {"replaced_by": body.id, "overlap_s": body.overlap_s}
        await audited(router, request, "keys rotate", key_id, after=after)
        new = keys.table.get(body.id)
        return {"old": _shown(old, now_ms), "new": new and _shown(new, now_ms)}

    @api.delete("/fleet/keys/{key_id}", include_in_schema=False)
    async def revoke(request: Request, key_id: str) -> dict[str, Any]:
        """Revoke a key. Every router refuses it within a second.

        Without Redis the routers of this host do, and those of other hosts once it answers.
        """
        check(request)
        is_own = OWN_ANSWER in request.headers
        now_ms = _now_ms()
        try:
            key, is_shared = await keys.revoke(key_id, now_ms, everywhere=not is_own)
        except KeyChangeError as error:
            raise _refusal(error) from error
        _LOG.info("revoked API key=%s everywhere=%s", key_id, is_shared)
        if not is_own:
            after = {"tenant": key.rights.tenant}
            # The sibling routers receive the call after this answer: do not wait for Redis here.
            await audited(router, request, "keys revoke", key_id, after=after, soon=not is_shared)
        return {**_shown(key, now_ms), "everywhere": is_shared}


def _retired(old: KeyRecord, body: _Successor, now_ms: int) -> KeyRecord:
    if old.replaced_by or old.state(now_ms) != "valid":
        why = f"replaced by {old.replaced_by}" if old.replaced_by else old.state(now_ms)
        raise KeyChangeError(f"the API key {old.id} is {why}; rotate a valid one")
    retires_ms = max(now_ms + int(body.overlap_s * 1000), 1)
    return msgspec.structs.replace(old, replaced_by=body.id, retires_ms=retires_ms)


def _successor(old: KeyRecord, body: _Successor, now_ms: int) -> KeyRecord:
    lifetime_ms = old.expires_ms - old.created_ms if old.expires_ms else 0
    if body.expires_s is not None:
        lifetime_ms = int(body.expires_s * 1000)
    return KeyRecord(
        id=body.id,
        sha256=body.sha256,
        rights=old.rights,
        created_ms=now_ms,
        expires_ms=now_ms + lifetime_ms if lifetime_ms else 0,
    )


def _record_of(new: _NewKey, now_ms: int) -> KeyRecord:
    return KeyRecord(
        id=new.id,
        sha256=new.sha256,
        rights=new.rights.model_dump(mode="json", exclude_defaults=True),
        created_ms=now_ms,
        expires_ms=0 if new.expires_s is None else now_ms + int(new.expires_s * 1000),
        by_hash=new.by_hash,
    )


def _check_rights(rights: ApiKeyConfig, router: Process) -> None:
    """Refuse rights that have no effect in this fleet."""
    logs = router.settings.logs
    if rights.log_text and not (logs.requests and logs.format == "json"):
        raise InvalidRequestError("log_text needs `logs: {format: json, requests: true}`")
    if rights.adapters == "own" and router.lanes.first.settings.adapter_folder is None:
        raise InvalidRequestError("`adapters: own` needs `adapters: {folder: FOLDER}`")


def _shown(key: IssuedKey, now_ms: int, used_day: int = 0) -> dict[str, Any]:
    """Return what operators see of a key; times are Unix seconds."""
    record = key.record
    used = datetime.fromtimestamp(used_day * DAY_MS / 1000, UTC).date().isoformat()
    return {
        "id": record.id,
        **key.rights.model_dump(mode="json"),
        "state": record.state(now_ms),
        "created": record.created_ms // 1000,
        "expires": record.end_ms // 1000 or None,
        "replaced_by": record.replaced_by or None,
        "last_used": used if used_day else None,
    }


def _refusal(error: Exception) -> Exception:
    if isinstance(error, UnconfirmedChangeError):
        return UnavailableError(
            "the fleet's Redis did not confirm the change, which is made now or never; see "
            "`baton keys ls`, and repeat the command if it was not made"
        )
    if isinstance(error, RegistryUnavailableError):
        return UnavailableError(
            "the fleet's Redis is unavailable, so nothing has changed and routers keep the last "
            "known API keys; repeat the command when it answers"
        )
    if isinstance(error, UnknownKeyError):
        return HTTPException(404, str(error))
    return InvalidRequestError(str(error))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
