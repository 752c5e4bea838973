"""What goes through Ray cannot be read there by who has not Ray's own token."""

from pathlib import Path

import msgspec
import pytest

from baton.config.secrets import SecretError
from fleet.pools.ray_runtime import packed
from fleet.pools.resources import ControllerSpec
from fleet.pools.sealing import seal, unseal, unsealed

SECRET = "redis://:a-password@host/0"


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the-token-of-ray")


def test_what_was_sealed_is_read_by_who_has_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = seal(SECRET)
    assert "password" not in sealed
    assert unseal(sealed) == SECRET
    assert unseal(SECRET) == SECRET and seal("") == ""
    assert unsealed({"redis_url": sealed, "host": "h", "epoch": 1}) == {
        "redis_url": SECRET,
        "host": "h",
        "epoch": 1,
    }
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    with pytest.raises(SecretError, match="must have the same one on all nodes"):
        unseal(sealed)


def test_the_token_is_found_where_ray_finds_it(tmp_path: Path, monkeypatch) -> None:
    sealed = seal(SECRET)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert seal(SECRET) == SECRET, "a Ray without a token can be read anyhow"
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("the-token-of-ray\n")
    assert unseal(sealed) == SECRET
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").write_text("another")
    with pytest.raises(SecretError):
        unseal(sealed)


def test_a_specification_is_sealed_where_it_leaves_this_host() -> None:
    spec = ControllerSpec(
        config_json='{"redis": "redis://:a-password@host"}',
        redis_url=SECRET,
        fleet_token="the-token-of-the-fleet",
        host="",
        log_dir="/l",
        sealed=True,
    )
    raw = packed(spec)
    assert b"password" not in raw and b"the-token" not in raw
    assert msgspec.json.decode(unseal(raw.decode()), type=ControllerSpec) == spec
    here = msgspec.structs.replace(spec, sealed=False)
    assert msgspec.json.decode(packed(here), type=ControllerSpec) == here
