"""The fleet's token: one for all routers of a fleet, over restarts, and in nobody's sight."""

import stat
from pathlib import Path

import pytest

from baton.config.fleet_file import FleetConfig
from baton.config.secrets import SecretError
from fleet.local.fleet_token import fleet_token, given_token


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    monkeypatch.delenv("BATON_FLEET_TOKEN", raising=False)
    monkeypatch.delenv("BATON_FLEET_TOKEN_FILE", raising=False)


def test_it_is_made_once_and_kept_for_its_user_alone(tmp_path: Path) -> None:
    """Finding 6: every `baton up` drew a new one, which orphaned other routers."""
    first = fleet_token("a")
    assert len(first.token) >= 32
    assert fleet_token("a") == first != fleet_token("b")
    file = tmp_path / "a" / "fleet.token"
    assert first.file == str(file), "so that a change of it is noticed"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert given_token() is None


def test_the_environment_goes_before_its_file(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "secret"
    file.write_text("of-a-file-with-a-line-end\n")
    monkeypatch.setenv("BATON_FLEET_TOKEN_FILE", str(file))
    assert fleet_token("a") == given_token() == ("of-a-file-with-a-line-end", str(file))
    assert given_token().environment["BATON_FLEET_TOKEN_FILE"] == str(file)
    monkeypatch.setenv("BATON_FLEET_TOKEN", "of-the-environment")
    assert given_token() == ("of-the-environment", "")
    assert "BATON_FLEET_TOKEN_FILE" not in given_token().environment


def test_the_fleet_file_goes_before_the_environment(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("BATON_FLEET_TOKEN", "of-the-environment")
    file = tmp_path / "secret"
    file.write_text("the-first-is-shown\nthe-second-is-accepted\n")
    config = FleetConfig.model_validate({"pools": {"token_file": str(file)}})
    known = given_token(config)
    assert known == ("the-first-is-shown", str(file))
    assert "BATON_FLEET_TOKEN" not in known.environment


def test_what_is_no_token_is_refused_and_not_shown(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("BATON_FLEET_TOKEN", "short")
    with pytest.raises(SecretError, match="has 5 characters, at least 16 are needed") as refused:
        given_token()
    assert "short" not in str(refused.value)
    monkeypatch.delenv("BATON_FLEET_TOKEN")
    monkeypatch.setenv("BATON_FLEET_TOKEN_FILE", str(tmp_path / "nothing"))
    with pytest.raises(SecretError, match="cannot be read"):
        fleet_token("a")
