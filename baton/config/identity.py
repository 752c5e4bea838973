"""Fleet file section on the identity provider whose tokens count beside API keys."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from baton.config.network import is_loopback
from baton.config.section import Section


def require_tls(url: str) -> str:
    """Return a URL whose answers cannot be forged; raise ValueError otherwise."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("must be an https:// URL without query")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ValueError("must be https://: keys that are changed on their way give all rights")
    return url


IssuerUrl = Annotated[str, StringConstraints(max_length=1024), AfterValidator(require_tls)]
ClaimName = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class OidcConfig(Section):
    """OpenID Connect issuer whose signed JWTs are bearer tokens of the API.

    A token has the rights of an API key with its tenant and role, until it expires.

    Attributes:
        issuer: URL of the issuer, as in the claim ``iss``.
        audience: Names of this API, one of which the claim ``aud`` must have.
        jwks_url: URL of the issuer's keys. Default: the one in its discovery document.
        tenant_claim: Claim with the tenant's name; ``a.b`` is ``b`` within ``a``.
        role_claim: Claim with the caller's roles, a text or a list. Without it, all callers are
            tenants.
        roles: Values of this claim, and the role that each gives, as for keys. Tokens without
            any are refused.
        clock_skew_s: Largest difference between the clocks of issuer and router.
        refresh_s: Time between two reads of the issuer's keys.
    """

    issuer: IssuerUrl
    audience: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    jwks_url: IssuerUrl | None = None
    tenant_claim: ClaimName = "tenant"
    role_claim: ClaimName | None = None
    roles: Mapping[str, Literal["tenant", "operator", "metrics"]] = {}
    clock_skew_s: Annotated[int, Field(ge=0, le=300)] = 30
    refresh_s: Annotated[float, Field(ge=60, le=24 * 3600)] = 300.0

    @model_validator(mode="after")
    def _roles_need_claim(self) -> Self:
        if (self.role_claim is None) == bool(self.roles):
            raise ValueError("role_claim and roles need each other: set both or none")
        return self
