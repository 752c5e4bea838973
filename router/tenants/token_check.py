"""Check of JWT bearer tokens against the keys of their issuer. Sans-IO: time is an argument.

A checked token is kept by its digest until it expires, so that its next call costs one hash. A
token whose key is unknown costs no signature check.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from joserfc import jwt
from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import JWKRegistry, Key, KeySet, OctKey
from joserfc.jws import JWSRegistry
from pydantic import ValidationError

from baton.config.clients import ApiKeyConfig
from baton.config.identity import OidcConfig
from baton.types.errors import UnauthorizedError, UnavailableError

MAX_TOKEN_BYTES = 8192
MAX_KEYS = 64  # of an issuer
KEPT_TOKENS = 8192
STALE_S = 24 * 3600  # after which keys that could not be read again do not count
_ALGORITHMS = tuple(f"{family}{bits}" for family in ("RS", "PS", "ES") for bits in (256, 384, 512))
_JWS = JWSRegistry(algorithms=(*_ALGORITHMS, "Ed25519", "EdDSA"), strict_check_header=False)


class CheckedToken(NamedTuple):
    """A valid token: its rights, its subject, and the Unix time when it ends."""

    rights: ApiKeyConfig
    subject: str
    ends_s: float


class TokenCheck:
    """Tokens of one issuer.

    Attributes:
        unknown_key: Whether a token named a key that the issuer may have added since.
    """

    def __init__(self, config: OidcConfig) -> None:
        self._config = config
        self._keys: KeySet | None = None
        self._keys_until_s = 0.0
        self._known: dict[bytes, CheckedToken] = {}
        self.unknown_key = False

    def use_keys(self, jwks: Any, now_s: float) -> None:
        """Use a key set of the issuer, without secret keys and those of unknown kinds.

        Raises ValueError if it is no key set, has too many keys, or none for signatures.
        """
        listed = jwks.get("keys") if isinstance(jwks, dict) else None
        if not isinstance(listed, list) or len(listed) > MAX_KEYS:
            raise ValueError(f"the issuer's keys are no JWKS of at most {MAX_KEYS} keys")
        keys: list[Key] = []
        for item in listed:
            try:
                key = JWKRegistry.import_key(item)
            except (JoseError, ValueError, TypeError, KeyError):
                continue
            if not isinstance(key, OctKey) and item.get("use", "sig") == "sig":
                keys.append(key)
        if not keys:
            raise ValueError("the issuer has no public key for signatures")
        fresh = KeySet(keys)
        if self._keys is None or self._keys.as_dict() != fresh.as_dict():
            self._known.clear()  # a key that the issuer removed does not count
        self._keys = fresh
        self._keys_until_s = now_s + STALE_S
        self.unknown_key = False

    def check(self, spelled: str, now_s: float) -> CheckedToken | None:
        """Return a token's rights and subject; None if it has not the form of a JWT.

        Raises:
            UnauthorizedError: The token is not valid.
            UnavailableError: The keys of the issuer are not known.
        """
        if not spelled.startswith("ey") or spelled.count(".") != 2:
            return None
        if len(spelled) > MAX_TOKEN_BYTES:
            raise UnauthorizedError(f"the token has more than {MAX_TOKEN_BYTES} bytes")
        if self._keys is None or now_s > self._keys_until_s:
            raise UnavailableError("the keys of the token's issuer cannot be read; retry later")
        digest = hashlib.blake2b(spelled.encode(), digest_size=16).digest()
        known = self._known.get(digest)
        if known is None:
            known = self._verified(spelled, self._keys, now_s)
            if len(self._known) >= KEPT_TOKENS:
                del self._known[next(iter(self._known))]
            self._known[digest] = known
        if now_s >= known.ends_s:
            self._known.pop(digest, None)
            raise UnauthorizedError("the token has expired; get another one")
        return known

    def _verified(self, spelled: str, keys: KeySet, now_s: float) -> CheckedToken:
        config = self._config
        try:
            claims = jwt.decode(spelled, keys, registry=_JWS).claims
            jwt.JWTClaimsRegistry(
                now=int(now_s),
                leeway=config.clock_skew_s,
                iss={"essential": True, "value": config.issuer},
                aud={"essential": True, "values": list(config.audience)},
                exp={"essential": True},
            ).validate(claims)
        except InvalidKeyIdError as error:
            self.unknown_key = True
            raise UnauthorizedError("the token's `kid` is none of its issuer's keys") from error
        except (JoseError, ValueError, TypeError, KeyError, RecursionError) as error:
            reason = str(error) if isinstance(error, JoseError) else type(error).__name__
            raise UnauthorizedError(f"the token is not valid: {reason}") from error
        ends_s = claims["exp"] + config.clock_skew_s
        return CheckedToken(self._rights_of(claims), str(claims.get("sub", "")), ends_s)

    def _rights_of(self, claims: Mapping[str, Any]) -> ApiKeyConfig:
        config = self._config
        role = "tenant"
        if config.role_claim is not None:
            has = _claim(claims, config.role_claim)
            named = has if isinstance(has, list) else [has]
            given = {config.roles.get(name) for name in named if isinstance(name, str)}
            if given <= {None}:
                raise UnauthorizedError(f"the token's claim {config.role_claim!r} gives no role")
            role = next(role for role in ("operator", "tenant", "metrics") if role in given)
        tenant = _claim(claims, config.tenant_claim)
        try:
            return ApiKeyConfig.model_validate({"tenant": tenant, "role": role})
        except ValidationError as error:
            message = f"the token's claim {config.tenant_claim!r} is no name of a tenant"
            raise UnauthorizedError(message) from error


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """Return a claim by its whole name, or else by the path that it names; None without one."""
    if name in claims:
        return claims[name]
    value: Any = claims
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
