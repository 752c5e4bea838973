"""Plain text leaves a host only where the fleet file says that it may."""

from pathlib import Path

import pytest

from baton.config.fleet_file import FleetConfig
from baton.config.load import ConfigError, load_config
from baton.config.network import is_loopback

TLS = "tls: {certificate: /c.pem, key: /c.key%s}"


@pytest.mark.parametrize(
    ("host", "here"),
    [
        *(("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True)),
        *(("localhost", True), ("0.0.0.0", False), ("::", False), ("10.0.0.1", False)),
        ("localhost.example.com", False),
    ],
)
def test_what_is_reached_from_elsewhere(host: str, here: bool) -> None:
    assert is_loopback(host) == here


def test_a_router_that_others_reach_needs_a_certificate(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("fleet: x\nhost: 0.0.0.0\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    said = str(caught.value)
    assert said.startswith(f"{file}:2: host = '0.0.0.0': other hosts would send prompts and keys")
    assert "baton certs DIR" in said and "clients: {insecure: true}" in said
    for line in ("clients: {insecure: true}", f"clients: {{{TLS % ''}}}"):
        file.write_text(f"host: 0.0.0.0\n{line}\n")
        assert load_config(file).host == "0.0.0.0"


def test_certificates_are_named_by_absolute_paths(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("pools:\n  tls: {certificate: c.pem, key: /k, ca: /ca}\n")
    with pytest.raises(ConfigError, match=r":2: pools.tls.certificate = 'c.pem': .*absolute path"):
        load_config(file)
    file.write_text("pools:\n  tls: {certificate: /c, kee: /k, ca: /ca}\n")
    with pytest.raises(ConfigError, match="did you mean `key`"):
        load_config(file)


def test_the_fleets_name_is_the_one_that_is_verified() -> None:
    pools = {"tls": {"certificate": "/c", "key": "/k", "ca": "/ca"}}
    config = FleetConfig.model_validate({"fleet": "paris", "pools": pools})
    assert config.pools.tls.files("paris").name == "paris.baton.internal"
    pools["tls"]["name"] = "baton.example.com"
    config = FleetConfig.model_validate({"fleet": "paris", "pools": pools})
    assert config.pools.tls.files("paris").name == "baton.example.com"
    again = FleetConfig.model_validate_json(config.to_json())
    assert again.pools.tls == config.pools.tls


def test_keys_stand_at_one_place() -> None:
    both = {"api_keys": {"key-of-one": "one"}, "clients": {"api_keys_file": "/keys.yaml"}}
    with pytest.raises(ValueError, match="remove one of them"):
        FleetConfig.model_validate(both)
    assert FleetConfig.model_validate({"clients": both["clients"]}).has_keys
    issued = {"api_keys": both["api_keys"], "clients": {"api_keys_file": "redis"}}
    assert FleetConfig.model_validate(issued).has_keys
    assert FleetConfig.model_validate({"clients": issued["clients"]}).has_keys
    with pytest.raises(ValueError, match="absolute path"):
        FleetConfig.model_validate({"clients": {"api_keys_file": "keys.yaml"}})
    star = {"clients": {"api_keys_file": "/keys.yaml", "cors_origins": ["*"]}}
    with pytest.raises(ValueError, match="any web page could use a key"):
        FleetConfig.model_validate(star)
