"""Who calls: the tenant, and what its API key may do.

A key is found by its hash, which differs from process to process, so neither the number of keys nor
a part of one that was guessed right shows in the time that an answer takes.
"""

import re
from collections.abc import Mapping
from hmac import compare_digest
from typing import NamedTuple

from baton.config.clients import ApiKeyConfig
from baton.types.errors import ForbiddenError, InvalidRequestError, UnauthorizedError
from router.settings import RouterSettings

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_FLEETS_OWN = ApiKeyConfig(tenant="fleet", role="operator")


class Access(NamedTuple):
    """Who calls, and what the caller may do.

    Attributes:
        min_priority: The lowest ``priority`` that may be asked for; None: any.
        own_adapters: It may load LoRA adapters for its tenant.
    """

    tenant: str
    operator: bool
    min_priority: int | None = None
    own_adapters: bool = False

    @property
    def sees(self) -> str | None:
        """The tenant whose adapters it sees beside everybody's; None: every tenant's."""
        return None if self.operator else self.tenant


def access_of(headers: Mapping[str, str], settings: RouterSettings) -> Access:
    """By API key where the fleet has keys; otherwise all may do all, as ``x-baton-tenant``.

    Raises:
        UnauthorizedError: The fleet has API keys and this is none of them.
        InvalidRequestError: The header has a value that it cannot have.
    """
    if settings.api_keys is not None:
        key = _key_of(headers, settings)
        if key is None:
            raise UnauthorizedError(
                "a valid API key is needed: `Authorization: Bearer KEY`, or `x-api-key: KEY`"
            )
        own_adapters = key.adapters == "own"
        return Access(key.tenant, key.role == "operator", key.min_priority, own_adapters)
    tenant = headers.get("x-baton-tenant", "default")
    if _TENANT.fullmatch(tenant) is None:
        raise InvalidRequestError(
            "x-baton-tenant: must be 1 to 64 letters, digits, '_', '.', '-'",
            param="x-baton-tenant",
        )
    return Access(tenant, operator=True)


def tenant_of(headers: Mapping[str, str], settings: RouterSettings) -> str:
    """The tenant: by API key where the fleet has keys, otherwise by ``x-baton-tenant``."""
    return access_of(headers, settings).tenant


def is_operator(headers: Mapping[str, str], settings: RouterSettings) -> bool:
    """Whether an operator calls: anyone, where the fleet has no keys."""
    if settings.api_keys is None:
        return True
    key = _key_of(headers, settings)
    return key is not None and key.role == "operator"


def has_operator_key(headers: Mapping[str, str], settings: RouterSettings) -> bool:
    """Whether the caller shows an operator's key, where the fleet has no keys for requests too."""
    key = _key_of(headers, settings)
    return key is not None and key.role == "operator"


def check_operator(headers: Mapping[str, str], settings: RouterSettings) -> None:
    """Refuse all but operators, where the fleet has API keys.

    Raises:
        UnauthorizedError: There is no valid key.
        ForbiddenError: The key is of an ordinary tenant.
    """
    if settings.api_keys is not None and not access_of(headers, settings).operator:
        raise ForbiddenError("this needs the key of an operator: `role: operator` in api_keys")


def adapter_owner_of(headers: Mapping[str, str], settings: RouterSettings) -> str:
    """The tenant whose adapters the caller may load and unload; empty: an operator, all.

    Raises:
        UnauthorizedError: There is no valid key.
        ForbiddenError: The key may do neither.
    """
    caller = access_of(headers, settings)
    if caller.operator:
        return ""
    if not caller.own_adapters:
        raise ForbiddenError(
            "this needs the key of an operator, or one with `adapters: own` in api_keys"
        )
    return caller.tenant


def _key_of(headers: Mapping[str, str], settings: RouterSettings) -> ApiKeyConfig | None:
    """What the caller's key may do."""
    spelled = _given_key(headers)
    found = (settings.api_keys or {}).get(spelled)
    # The fleet's own token is what `baton status` has.
    for token in settings.fleet_token.accepted:
        if compare_digest(token.encode(), spelled.encode()):
            found = _FLEETS_OWN
    return found


def _given_key(headers: Mapping[str, str]) -> str:
    """The key in OpenAI's header or, where that has none, in Anthropic's; empty for none."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
