"""Access control: tenant and rights of the caller, from its API key or its issuer's token.

Keys of the fleet file are looked up by a hash that differs in each process, and issued keys by
their id. The response time therefore reveals neither the number of keys nor whether a part of a
secret is right. The record of an imported key prevails over a line of the fleet file.
"""

import contextlib
import re
import secrets
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hmac import compare_digest
from time import time, time_ns
from typing import NamedTuple

from baton.config.clients import KEYS_IN_REDIS, ApiKeyConfig, SloConfig
from baton.config.fleet_file import FleetConfig
from baton.config.secrets import ApiKeysFile
from baton.tenants.key_record import hash_of
from baton.types.errors import (
    ForbiddenError,
    InvalidRequestError,
    UnauthorizedError,
    UnavailableError,
)
from baton.types.slo import Slo
from baton.wire.fleet_token import FleetToken
from router.tenants.key_table import KeyTable
from router.tenants.policies import TenantPolicies
from router.tenants.token_check import TokenCheck

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_OPERATOR = re.compile(r"[A-Za-z0-9_.@-]{1,128}")
_FLEETS_OWN = ApiKeyConfig(tenant="fleet", role="operator")
_FLEET_KEY_ID = "fleet"  # of the fleet token
_BATCH_KEY_ID = "batch"  # of lines of batches, which need no key
_OIDC_KEY_ID = "oidc"  # of tokens, whose subjects are too many for usage


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


def api_keys_of(config: FleetConfig) -> Mapping[str, ApiKeyConfig] | None:
    """Return the API keys of the fleet file, or of its file of keys; None: none is required.

    Raises:
        SecretError: The file cannot be used.
    """
    file = config.clients.api_keys_file
    if file not in (None, KEYS_IN_REDIS):
        return ApiKeysFile(file)
    return dict(config.api_keys or {}) if config.has_keys else None


class AccessControl:
    """API keys of a router, and the rights that they give.

    Attributes:
        api_keys: API keys of the fleet file to their rights; None: requests need no key.
        issued_keys: API keys of ``baton keys``.
        policies: Policies of the tenants of these keys.
        tokens: Check of the tokens of an issuer; None: only keys count.
        own_key: Key with which this process calls itself for a tenant.
    """

    def __init__(
        self,
        api_keys: Mapping[str, ApiKeyConfig] | None,
        fleet_token: FleetToken,
        policies: TenantPolicies,
        tokens: TokenCheck | None = None,
    ) -> None:
        self.api_keys = api_keys
        self.issued_keys = KeyTable()
        self.policies = policies
        self.tokens = tokens
        self.own_key = secrets.token_hex(32)
        self._fleet_token = fleet_token

    @property
    def needs_key(self) -> bool:
        """True if requests need an API key."""
        return self.api_keys is not None

    def of(self, headers: Mapping[str, str]) -> Access:
        """Return the rights of the caller's API key; without API keys, callers have all rights.

        Raises:
            UnauthorizedError: The API key is missing, unknown, expired or revoked.
            ForbiddenError: The API key is for scrapes only.
            UnavailableError: The keys for tokens cannot be read.
            InvalidRequestError: The value of ``x-baton-tenant`` is invalid.
        """
        if self.needs_key:
            key_id, key = self._key_of(headers)
            if key.role == "metrics":
                raise ForbiddenError(
                    "an API key with the role `metrics` reads /metrics, /load and /fleet/targets"
                )
            policy = self.policies.of(key.tenant)
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
        policy = self.policies.of(tenant)
        return Access(tenant, operator=True, slo=policy.slo, models=policy.models)

    def tenant(self, headers: Mapping[str, str]) -> str:
        """Return the tenant of the API key or, without API keys, of ``x-baton-tenant``."""
        return self.of(headers).tenant

    def is_operator(self, headers: Mapping[str, str]) -> bool:
        """Return whether the caller is an operator; without API keys, all callers are."""
        return not self.needs_key or self.has_operator_key(headers)

    def has_key(self, headers: Mapping[str, str]) -> bool:
        """Return whether the caller has a valid API key or the fleet token."""
        try:
            return bool(self._key_of(headers))
        except (UnauthorizedError, UnavailableError):
            return False

    def has_operator_key(self, headers: Mapping[str, str]) -> bool:
        """Return whether the caller has an operator's key or the fleet token."""
        try:
            return self._key_of(headers)[1].role == "operator"
        except (UnauthorizedError, UnavailableError):
            return False

    def check_scrape(self, headers: Mapping[str, str]) -> None:
        """Reject callers that may not scrape metrics, if the fleet has API keys."""
        if self.needs_key and self._key_of(headers)[1].role == "tenant":
            raise ForbiddenError("an API key with the role `metrics` or `operator` is required")

    def check_operator(self, headers: Mapping[str, str]) -> None:
        """Reject callers that are not operators, if the fleet has API keys."""
        if self.needs_key and not self.of(headers).operator:
            raise ForbiddenError("an API key with the role `operator` is required")

    def check_change(self, headers: Mapping[str, str]) -> None:
        """Reject callers that may not change the fleet.

        They need an operator's key or the fleet token, even if requests need no key.
        """
        self.check_operator(headers)
        if not self.has_operator_key(headers):
            raise UnauthorizedError(
                "changes of the fleet need the fleet token, the file fleet.token in its state "
                "folder, or an operator's API key: `Authorization: Bearer TOKEN`"
            )

    def adapter_owner(self, headers: Mapping[str, str]) -> str:
        """Return the tenant whose adapters the caller may load and unload; empty: all tenants."""
        if not self.needs_key:
            self.check_change(headers)
        caller = self.of(headers)
        if caller.operator:
            return ""
        if not caller.own_adapters:
            raise ForbiddenError("an operator's API key, or one with `adapters: own`, is required")
        return caller.tenant

    def name(self, headers: Mapping[str, str]) -> str:
        """Return the name of a caller in the audit log: the id of its key, never the key.

        The commands of `baton` send the fleet token, and name their user in ``x-baton-operator``.
        """
        spelled = _given_key(headers)
        if self._is_fleet_token(spelled):
            named = headers.get("x-baton-operator", "")
            return f"operator {named}" if _OPERATOR.fullmatch(named) else "fleet token"
        issued = self.issued_keys.find(spelled)
        if issued is not None:
            return f"key {issued.record.id}"
        rights = (self.api_keys or {}).get(spelled)
        if rights is not None:
            return f"key of tenant {rights.tenant} in the fleet file"
        with contextlib.suppress(UnauthorizedError, UnavailableError):
            if self.tokens is not None and (token := self.tokens.check(spelled, time())):
                is_plain = _OPERATOR.fullmatch(token.subject) is not None
                subject = token.subject if is_plain else hash_of(token.subject).hex()[:12]
                return f"token of {subject} of tenant {token.rights.tenant}"
        return "unknown" if self.needs_key else "anyone"

    def keys_of(self, tenant: str, now_ms: int) -> Iterator[ApiKeyConfig]:
        """Yield the rights of a tenant's valid keys in the fleet file, which can send requests."""
        for spelled, rights in (self.api_keys or {}).items():
            if rights.role == "metrics":
                continue
            if rights.tenant == tenant and not self.issued_keys.is_ended(spelled, now_ms):
                yield rights

    def logs_text(self, tenant: str) -> bool:
        """Return whether a valid key of a tenant has ``log_text``."""
        now_ms = time_ns() // 1_000_000
        in_file = any(rights.log_text for rights in self.keys_of(tenant, now_ms))
        return in_file or self.issued_keys.logs_text(tenant, now_ms)

    def _is_fleet_token(self, spelled: str) -> bool:
        raw = spelled.encode()
        equal = [compare_digest(token.encode(), raw) for token in self._fleet_token.accepted]
        return any(equal)  # compares with all, so that the time does not show which one it is

    def _key_of(self, headers: Mapping[str, str]) -> tuple[str, ApiKeyConfig]:
        """Return the id of the caller's key, and its rights."""
        spelled = _given_key(headers)
        if self._is_fleet_token(spelled):  # `baton status` sends it
            return _FLEET_KEY_ID, _FLEETS_OWN
        now_ms = time_ns() // 1_000_000
        if compare_digest(self.own_key.encode(), spelled.encode()):
            return _BATCH_KEY_ID, self._rights_of_tenant(headers["x-baton-tenant"], now_ms)
        issued = self.issued_keys.find(spelled)
        if issued is None:
            rights = (self.api_keys or {}).get(spelled)
            if rights is None:
                if self.tokens is not None and (token := self.tokens.check(spelled, time())):
                    return _OIDC_KEY_ID, token.rights
                raise UnauthorizedError(
                    "a valid API key is required: `Authorization: Bearer KEY` or `x-api-key: KEY`"
                )
            return _file_key_id(spelled), rights
        state = issued.record.state(now_ms)
        if state != "valid":
            raise UnauthorizedError(f"the API key {issued.record.id} is {state}; use another one")
        self.issued_keys.note_use(issued, now_ms)
        return issued.record.id, issued.rights

    def _rights_of_tenant(self, tenant: str, now_ms: int) -> ApiKeyConfig:
        """Return the rights of a call that this process makes for a tenant, such as a batch's."""
        in_file = next(self.keys_of(tenant, now_ms), None)
        rights = in_file or self.issued_keys.of_tenant(tenant, now_ms)
        if rights is None and self.tokens is not None and not self.issued_keys.has(tenant):
            return ApiKeyConfig(tenant=tenant)  # its batch began with a token that has ended since
        if rights is None:
            raise UnauthorizedError(f"tenant {tenant} has no valid API key any more")
        return rights


@lru_cache(maxsize=4096)
def _file_key_id(spelled: str) -> str:
    """Return the id of a key of the fleet file, which is a digest of it."""
    return f"file-{hash_of(spelled).hex()[:12]}"


def _given_key(headers: Mapping[str, str]) -> str:
    """Return the key from OpenAI's header or else Anthropic's; empty if there is none."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
