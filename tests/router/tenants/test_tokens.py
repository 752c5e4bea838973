"""JWT bearer tokens of a real local issuer, at a real router."""

import asyncio
import base64
import hmac
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, KeySet, OctKey, OKPKey, RSAKey
from joserfc.jws import JWSRegistry
from pydantic import ValidationError

from baton.config.clients import ApiKeyConfig, ClientLimitsConfig
from baton.config.fleet_file import FleetConfig
from baton.config.identity import OidcConfig
from baton.config.load import ConfigError, load_config
from baton.tenants.key_record import issue, new_key
from baton.types.errors import UnauthorizedError, UnavailableError
from baton.wire.fleet_token import FleetToken
from router.tenants import issuer_keys
from router.tenants.access import AccessControl
from router.tenants.policies import TenantPolicies
from router.tenants.token_check import KEPT_TOKENS, MAX_TOKEN_BYTES, STALE_S, TokenCheck
from tests.router.conftest import make_fleet, model, until
from tests.router.emulated_worker import Script

__all__ = ["make_fleet", "model"]

RSA = RSAKey.generate_key(2048, {"kid": "one", "use": "sig"})
EC = ECKey.generate_key("P-256", {"kid": "two", "use": "sig", "alg": "ES256"})
SERVED = ("baton", "other-api")


class Issuer:
    """An OpenID provider on a port of its own; it signs whatever a test wants."""

    def __init__(self) -> None:
        self.keys, self.reads, self.is_up = [RSA], 0, True
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.endswith("/openid-configuration"):
                    document = {"issuer": issuer.url, "jwks_uri": f"{issuer.url}/keys"}
                else:
                    issuer.reads += 1
                    document = KeySet(issuer.keys).as_dict()
                body = json.dumps(document).encode()
                self.send_response(200 if issuer.is_up else 500)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/realm"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def claims(self, **claims) -> dict:
        now = int(time.time())
        return {
            "iss": self.url,
            "aud": ["account", "baton"],
            "sub": "user-7",
            "tenant": "team-a",
            "iat": now,
            "exp": now + 600,
        } | claims

    def token(self, key=RSA, alg="RS256", **claims) -> str:
        registry = JWSRegistry(algorithms=[alg])
        return jwt.encode({"alg": alg, "kid": key.kid}, self.claims(**claims), key, [alg], registry)

    def config(self, **more) -> OidcConfig:
        given = {"issuer": self.url, "audience": list(SERVED)} | more
        return OidcConfig.model_validate(given)


@pytest.fixture
def issuer():
    made = Issuer()
    yield made
    made.close()


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


ROLES = {"role_claim": "realm_access.roles", "roles": {"admins": "operator", "users": "tenant"}}


def with_roles(*names) -> dict:
    return {"realm_access": {"roles": list(names)}}


async def test_tokens_of_an_issuer_count_beside_keys_until_they_end(
    issuer, make_fleet, monkeypatch
):
    monkeypatch.setattr(issuer_keys, "UNKNOWN_PAUSE_S", 1.0)
    monkeypatch.setattr(issuer_keys, "_POLL_S", 0.02)
    fleet = await make_fleet(
        {"decode-0": Script(step_s=0.001)},
        clients=ClientLimitsConfig(oidc=issuer.config(clock_skew_s=0, **ROLES)),
        api_keys={"key-of-two": ApiKeyConfig(tenant="two")},
    )
    await until(lambda: fleet.router.access.tokens._keys is not None)
    assert issuer.reads == 1
    get = fleet.http.get
    member = bearer(issuer.token(**with_roles("users")))
    admin = bearer(issuer.token(**with_roles("x", "admins"), sub="root"))
    answer = await fleet.chat(headers=member)
    assert answer.status_code == 200
    assert (await fleet.chat(headers=bearer("key-of-two"))).status_code == 200
    own = f"/fleet/requests/{answer.headers['x-request-id']}"
    assert (await get(own, headers=member)).json()["tenant"] == "team-a"
    assert (await get(own, headers=bearer("key-of-two"))).status_code == 404
    assert (await get("/metrics", headers=member)).status_code == 403
    assert (await get("/metrics", headers=admin)).status_code == 200
    # No more rights than a key of the role: priority, adapters.
    assert (await fleet.chat(headers=admin, priority=-1)).status_code == 400
    load = await fleet.http.post(
        "/v1/load_lora_adapter", headers=member, json={"lora_name": "a", "lora_path": "b"}
    )
    assert load.status_code == 403
    access = fleet.router.access
    assert access.name(admin) == "token of root of tenant team-a"
    assert access.of({"authorization": f"bearer {admin['authorization'][7:]}"}).operator

    ends = bearer(issuer.token(**with_roles("users"), exp=int(time.time()) + 2))
    assert (await fleet.chat(headers=ends)).status_code == 200
    await asyncio.sleep(2.1)
    refused = await fleet.chat(headers=ends)
    assert refused.status_code == 401 and "expired" in refused.json()["error"]["message"]

    # The issuer has another key; tokens of the old one end with it.
    issuer.keys = [EC]
    fresh = bearer(issuer.token(EC, "ES256", **with_roles("users")))
    began = issuer.reads
    statuses = [(await fleet.chat(headers=fresh)).status_code for _ in range(5)]
    assert statuses[0] == 401 or began > 1
    await until(lambda: issuer.reads > began)
    await until(lambda: not access.tokens.unknown_key)
    assert (await fleet.chat(headers=fresh)).status_code == 200
    assert (await fleet.chat(headers=member)).status_code == 401
    # Tokens that name unknown keys lead to one read each pause, whatever their number.
    reads, began_s = issuer.reads, time.monotonic()
    forged = RSAKey.generate_key(2048, {"kid": "never"})
    while time.monotonic() - began_s < 1.5:
        assert (await fleet.chat(headers=bearer(issuer.token(forged)))).status_code == 401
    assert issuer.reads - reads <= 2
    # Without the issuer the last keys stay in use.
    issuer.is_up = False
    access.tokens.unknown_key = True
    await asyncio.sleep(1.5)
    assert (await fleet.chat(headers=fresh)).status_code == 200


def made_check(issuer, keys=(RSA, EC), **more) -> TokenCheck:
    check = TokenCheck(issuer.config(**more))
    check.use_keys(KeySet(list(keys)).as_dict(), time.time())
    return check


def unsigned(header: dict, claims: dict, signature: bytes = b"") -> str:
    parts = [json.dumps(header).encode(), json.dumps(claims).encode(), signature]
    return ".".join(map(in_base64, parts))


def in_base64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def test_tokens_that_are_refused(issuer):
    check, now = made_check(issuer), time.time()
    sealed = unsigned({"alg": "HS256", "kid": "one"}, issuer.claims()).rstrip(".")
    mac = hmac.digest(RSA.as_pem(private=False), sealed.encode(), "sha256")
    good, other = issuer.token(), RSAKey.generate_key(2048, {"kid": "one"})
    head, body, signature = good.split(".")
    changed = in_base64(json.dumps(issuer.claims(tenant="other")).encode())
    later = int(now) + 100
    refused = {
        "none": unsigned({"alg": "none", "kid": "one"}, issuer.claims()),
        "public key as secret": f"{sealed}.{in_base64(mac)}",
        "another's key": issuer.token(other),
        "kind of another key": unsigned({"alg": "ES256", "kid": "one"}, issuer.claims(), b"x" * 64),
        "changed": f"{head}.{changed}.{signature}",
        "cut": f"{head}.{body}.{signature[:-8]}",
        "no signature": f"{head}.{body}.",
        "no JSON": "ey.ey.ey",
        "deep": unsigned({"alg": "RS256", "kid": [[[[]]]]}, {}),
        "critical": unsigned({"alg": "RS256", "kid": "one", "crit": ["x"], "x": 1}, {}),
        "long": good + "A" * MAX_TOKEN_BYTES,
        "issuer": issuer.token(iss=issuer.url + "/"),
        "audience": issuer.token(aud="baton-2"),
        "no audience": issuer.token(aud=None),
        "expired": issuer.token(exp=int(now) - 31),
        "no end": issuer.token(exp=None),
        "text as end": issuer.token(exp="9999999999"),
        "not yet": issuer.token(nbf=later),
        "of the future": issuer.token(iat=later),
        "no tenant": issuer.token(tenant=None),
        "bad tenant": issuer.token(tenant="a/b"),
        "list of tenants": issuer.token(tenant=["a"]),
    }
    for why, token in refused.items():
        with pytest.raises(UnauthorizedError):
            print(why, check.check(token, now))
    assert check.check(good, now).rights == ApiKeyConfig(tenant="team-a")
    assert check.check(issuer.token(exp=int(now) - 25), now).ends_s > now  # clocks differ
    assert check.check(issuer.token(EC, "ES256", aud="other-api"), now).rights.role == "tenant"
    assert not check.unknown_key


def test_a_role_is_a_value_that_the_fleet_file_names(issuer):
    check, now = (
        made_check(issuer, role_claim="https://x.example/r", roles={"a": "operator"}),
        time.time(),
    )
    for roles in (None, "b", [], ["b", ["a"], None], {"a": 1}, "operator"):
        with pytest.raises(UnauthorizedError):
            check.check(issuer.token(**{"https://x.example/r": roles}), now)
    for roles in ("a", ["b", "a"]):
        token = issuer.token(**{"https://x.example/r": roles})
        assert check.check(token, now).rights == ApiKeyConfig(tenant="team-a", role="operator")
    check = made_check(issuer, role_claim="r", roles={"m": "metrics", "u": "tenant"})
    for roles, role in (["m"], "metrics"), (["m", "u"], "tenant"):
        assert check.check(issuer.token(r=roles), now).rights.role == role


def test_kept_tokens_are_bounded_and_end_with_their_keys(issuer, monkeypatch):
    check, now = made_check(issuer), time.time()
    token = issuer.token()
    check.check(token, now)
    monkeypatch.setattr(jwt, "decode", None)  # a second look at the signature would fail
    assert check.check(token, now).subject == "user-7"
    monkeypatch.undo()
    tokens = [issuer.token(EC, "ES256", sub=str(n)) for n in range(3)]
    monkeypatch.setattr("router.tenants.token_check.KEPT_TOKENS", 2)
    for made in tokens:
        check.check(made, now)
    assert len(check._known) == 2 < KEPT_TOKENS
    check.use_keys(KeySet([EC]).as_dict(), now)
    with pytest.raises(UnauthorizedError, match="kid"):
        check.check(token, now)
    assert check.unknown_key
    with pytest.raises(UnavailableError):
        check.check(tokens[0], now + STALE_S + 1)
    with pytest.raises(UnavailableError):
        TokenCheck(issuer.config()).check(token, now)


@pytest.mark.filterwarnings("ignore:EdDSA is deprecated")  # issuers use it all the same
@pytest.mark.parametrize("alg", ["Ed25519", "EdDSA"])
def test_both_names_of_edwards_curves_count(issuer, alg):
    key = OKPKey.generate_key("Ed25519", {"kid": "edwards"})
    check = made_check(issuer)
    check.use_keys({"keys": [key.as_dict(private=False), RSA.as_dict(private=False)]}, time.time())
    assert check.check(issuer.token(key, alg), time.time()).subject == "user-7"


def test_keys_that_are_no_keys_for_signatures_do_not_count(issuer):
    check = TokenCheck(issuer.config())
    secret = {"kty": "oct", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3I", "kid": "s"}
    sealed = RSA.as_dict(private=False) | {"use": "enc"}
    for jwks in (None, [], {"keys": 1}, {"keys": [secret, sealed, 1, {"kty": "ML"}]}):
        with pytest.raises(ValueError):
            check.use_keys(jwks, 0.0)
    with pytest.raises(ValueError, match="64"):
        check.use_keys({"keys": [EC.as_dict(private=False)] * 65}, 0.0)
    check.use_keys({"keys": [secret, EC.as_dict(private=False)]}, time.time())
    assert check.check(issuer.token(EC, "ES256"), time.time())
    with pytest.raises(UnauthorizedError):
        check.check(issuer.token(OctKey.import_key(secret), "HS256"), time.time())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"issuer": "http://id.example"}, "must be https"),
        ({"issuer": "https://id.example", "audience": []}, "audience"),
        ({"issuer": "https://id.example", "roles": {"a": "operator"}}, "role_claim and roles"),
        ({"issuer": "https://id.example", "jwks_url": "file:///etc/keys"}, "must be an https"),
        ({"issuer": "https://id.example", "clock_skew_s": 301}, "less than or equal to 300"),
    ],
)
def test_sections_that_are_refused(fields, message, tmp_path):
    with pytest.raises(ValidationError, match=message):
        FleetConfig.model_validate({"clients": {"oidc": {"audience": ["a"]} | fields}})
    file = tmp_path / "fleet.yaml"
    file.write_text("clients: {oidc: {issuer: https://a.b, audience: [a], role_clam: r}}")
    with pytest.raises(ConfigError, match="did you mean `role_claim`"):
        load_config(file)
    right = {"issuer": "https://id.example", "audience": ["a"]}
    assert FleetConfig.model_validate({"clients": {"oidc": right}}).has_keys


def test_a_batch_outlives_its_token_but_not_the_keys_of_its_tenant(issuer):
    keys = {"key-of-two": ApiKeyConfig(tenant="two")}
    tokens = made_check(issuer)
    access = AccessControl(keys, FleetToken("secret"), TenantPolicies(), tokens)

    def line_of(tenant: str):
        return access.of(bearer(access.own_key) | {"x-baton-tenant": tenant})

    assert line_of("team-a").operator is False
    assert line_of("two").tenant == "two"
    rights = {"tenant": "ended"}
    record = issue(new_key(), rights, created_ms=1, expires_ms=2)
    access.issued_keys.adopt(record)
    with pytest.raises(UnauthorizedError):
        line_of("ended")
    access.tokens = None
    with pytest.raises(UnauthorizedError):
        line_of("team-a")
