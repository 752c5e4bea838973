"""Access control: tenant and rights of the caller, from its API key.

Keys of the fleet file are looked up by a hash that differs in each process, and issued keys by
their id. The response time therefore reveals neither the number of keys nor whether a part of a
secret is right. The record of an imported key prevails over a line of the fleet file.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from hmac import compare_digest
from time import time_ns
from typing import NamedTuple

from baton.config.clients import ApiKeyConfig, SloConfig
from baton.tenants.key_record import hash_of
from baton.types.errors import ForbiddenError, InvalidRequestError, UnauthorizedError
from baton.types.slo import Slo
from router.settings import RouterSettings

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_OPERATOR = re.compile(r"[A-Za-z0-9_.@-]{1,128}")
_FLEETS_OWN = ApiKeyConfig(tenant="fleet", role="operator")
_FLEET_KEY_ID = "fleet"  # of the fleet token
_BATCH_KEY_ID = "batch"  # of lines of batches, which need no key


class Access(NamedTuple):
    """Tenant and rights of a caller.

    Attributes:
        min_priority: Lowest value of ``priority`` that is allowed; None: any.
        own_adapters: Whether the caller may load LoRA adapters for its tenant.
        slo: Latencies of its requests, of the key or else of the tenant; None: the fleet's.
        models: Models that it may name; None: all.
        key_id: Id of the API key, under which usage is counted; empty without API keys.
    """

    tenant: str
    operator: bool
    min_priority: int | None = None
    own_adapters: bool = False
    slo: SloConfig | Slo | None = None
    models: tuple[str, ...] | None = None
    key_id: str = ""

    @property
    def sees(self) -> str | None:
        """Tenant whose adapters are visible besides the shared ones; None: all tenants'."""
        return None if self.operator else self.tenant


def access_of(headers: Mapping[str, str], settings: RouterSettings) -> Access:
    """Return the rights of the caller's API key; without API keys, callers have all rights.

    Raises:
        UnauthorizedError: The API key is missing, unknown, expired or revoked.
        InvalidRequestError: The value of ``x-baton-tenant`` is invalid.
    """
    if settings.api_keys is not None:
        key_id, key = _key_of(headers, settings)
        policy = settings.policies.of(key.tenant)
        return Access(
            tenant=key.tenant,
            operator=key.role == "operator",
            min_priority=key.min_priority,
            own_adapters=key.adapters == "own",
            slo=key.slo or policy.slo,
            models=policy.models,
            key_id=key_id,
        )
    tenant = headers.get("x-baton-tenant", "default")
    if _TENANT.fullmatch(tenant) is None:
        raise InvalidRequestError.at(
            "x-baton-tenant", "must be 1 to 64 characters of letters, digits, '_', '.' and '-'"
        )
    policy = settings.policies.of(tenant)
    return Access(tenant, operator=True, slo=policy.slo, models=policy.models)


def tenant_of(headers: Mapping[str, str], settings: RouterSettings) -> str:
    """Return the tenant of the API key or, without API keys, of ``x-baton-tenant``."""
    return access_of(headers, settings).tenant


def is_operator(headers: Mapping[str, str], settings: RouterSettings) -> bool:
    """Return whether the caller is an operator; without API keys, all callers are."""
    return settings.api_keys is None or has_operator_key(headers, settings)


def has_key(headers: Mapping[str, str], settings: RouterSettings) -> bool:
    """Return whether the caller has a valid API key or the fleet token."""
    try:
        return bool(_key_of(headers, settings))
    except UnauthorizedError:
        return False


def has_operator_key(headers: Mapping[str, str], settings: RouterSettings) -> bool:
    """Return whether the caller has an operator's key or the fleet token."""
    try:
        return _key_of(headers, settings)[1].role == "operator"
    except UnauthorizedError:
        return False


def check_operator(headers: Mapping[str, str], settings: RouterSettings) -> None:
    """Reject callers that are not operators, if the fleet has API keys."""
    if settings.api_keys is not None and not access_of(headers, settings).operator:
        raise ForbiddenError("an API key with the role `operator` is required")


def check_change(headers: Mapping[str, str], settings: RouterSettings) -> None:
    """Reject callers that may not change the fleet.

    They need an operator's key or the fleet token, even if requests need no key.
    """
    check_operator(headers, settings)
    if not has_operator_key(headers, settings):
        raise UnauthorizedError(
            "changes of the fleet need the fleet token, the file fleet.token in its state folder, "
            "or an operator's API key: `Authorization: Bearer TOKEN`"
        )


def adapter_owner_of(headers: Mapping[str, str], settings: RouterSettings) -> str:
    """Return the tenant whose adapters the caller may load and unload; empty: all tenants."""
    if settings.api_keys is None:
        check_change(headers, settings)
    caller = access_of(headers, settings)
    if caller.operator:
        return ""
    if not caller.own_adapters:
        raise ForbiddenError("an operator's API key, or one with `adapters: own`, is required")
    return caller.tenant


def who_of(headers: Mapping[str, str], settings: RouterSettings) -> str:
    """Return the name of a caller in the audit log: the id of its key, never the key.

    The commands of `baton` send the fleet token, and name their user in ``x-baton-operator``.
    """
    spelled = _given_key(headers)
    raw = spelled.encode()
    of_fleet = [compare_digest(token.encode(), raw) for token in settings.fleet_token.accepted]
    if any(of_fleet):
        named = headers.get("x-baton-operator", "")
        return f"operator {named}" if _OPERATOR.fullmatch(named) else "fleet token"
    issued = settings.issued_keys.find(spelled)
    if issued is not None:
        return f"key {issued.record.id}"
    found = (settings.api_keys or {}).get(spelled)
    if found is not None:
        return f"key of tenant {found.tenant} in the fleet file"
    return "anyone" if settings.api_keys is None else "unknown"


def _key_of(headers: Mapping[str, str], settings: RouterSettings) -> tuple[str, ApiKeyConfig]:
    """Return the id of the caller's key, and its rights."""
    spelled = _given_key(headers)
    raw = spelled.encode()
    # `baton status` sends the fleet token.
    of_fleet = [compare_digest(token.encode(), raw) for token in settings.fleet_token.accepted]
    if any(of_fleet):
        return _FLEET_KEY_ID, _FLEETS_OWN
    now_ms = time_ns() // 1_000_000
    if compare_digest(settings.own_key.encode(), raw):
        return _BATCH_KEY_ID, _rights_of_tenant(headers["x-baton-tenant"], settings, now_ms)
    issued = settings.issued_keys.find(spelled)
    if issued is None:
        found = (settings.api_keys or {}).get(spelled)
        if found is None:
            raise UnauthorizedError(
                "a valid API key is required: `Authorization: Bearer KEY` or `x-api-key: KEY`"
            )
        return _file_key_id(spelled), found
    state = issued.record.state(now_ms)
    if state != "valid":
        raise UnauthorizedError(f"the API key {issued.record.id} is {state}; use another one")
    settings.issued_keys.note_use(issued, now_ms)
    return issued.record.id, issued.rights


@lru_cache(maxsize=4096)
def _file_key_id(spelled: str) -> str:
    """Return the id of a key of the fleet file, which is a digest of it."""
    return f"file-{hash_of(spelled).hex()[:12]}"


def _rights_of_tenant(tenant: str, settings: RouterSettings, now_ms: int) -> ApiKeyConfig:
    """Return the rights of a call that this process makes for a tenant, such as a batch's."""
    issued = settings.issued_keys
    for spelled, rights in (settings.api_keys or {}).items():
        if rights.tenant == tenant and not issued.is_ended(spelled, now_ms):
            return rights
    found = issued.of_tenant(tenant, now_ms)
    if found is None:
        raise UnauthorizedError(f"tenant {tenant} has no valid API key any more")
    return found


def _given_key(headers: Mapping[str, str]) -> str:
    """Return the key from OpenAI's header or else Anthropic's; empty if there is none."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
