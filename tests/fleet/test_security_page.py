"""The commands of the first section of the page of tenants, on a fleet with emulated engines."""

import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from baton.engine.settings import EmulatedModel
from fleet.cli.main import app
from tests.e2e.fleet_processes import NAME, TOKEN, Fleet

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "tenants.md"
SECTION = "## Give a team a key, and take it away"
EMULATED = EmulatedModel(
    timing="epyc-135m", vocab_size=49152, eos_token_ids=(2,), max_context_tokens=4096
)
ALSO = "pools: {engine: emulated, prefill: 0, decode: 1}\nclients: {api_keys_file: redis}\n"
TENANT = "team-a"


def section() -> str:
    return PAGE.read_text().partition(SECTION)[2].partition("\n## ")[0]


def commands() -> Iterator[list[str]]:
    for line in re.findall(r"^\$ baton (.*)$", section(), re.MULTILINE):
        yield shlex.split(line)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    running = Fleet(tmp_path)
    try:
        running.start("decode-0", queued=100, also=ALSO, emulated=EMULATED)
        running.start_router()
        monkeypatch.setenv("BATON_URL", running.url)
        monkeypatch.setenv("BATON_API_KEY", TOKEN)
        monkeypatch.setenv("COLUMNS", "200")
        yield running
    finally:
        running.stop()


class Team:
    """A team with its key, and what an operator reads about it."""

    def __init__(self, fleet: Fleet) -> None:
        self.urls = [url for _, url in fleet.routers]
        self.keys: list[str] = []

    def call(self, key: str) -> list[httpx.Response]:
        """Call each router."""
        body = {"model": NAME, "prompt": "hello", "max_tokens": 2}
        headers = {"authorization": f"Bearer {key}"}
        return [
            httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=20)
            for url in self.urls
        ]

    def run(self, arguments: list[str]) -> str:
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    def done(self, arguments: list[str]) -> str:
        """Run a command of the page with the ids of the team's keys, newest first."""
        if "ID" not in arguments:
            return self.run(arguments)
        ids = [key[3:15] for key in reversed(self.keys)]
        ids = ids if arguments[1] == "revoke" else ids[:1]
        return "".join(self.run([id_ if it == "ID" else it for it in arguments]) for id_ in ids)


def test_the_section_fits_on_one_page() -> None:
    assert len(section().split()) <= 350


@pytest.mark.slow
def test_its_commands_give_a_team_a_key_and_take_it_away(fleet: Fleet) -> None:
    team = Team(fleet)
    verbs = []
    for arguments in commands():
        text = team.done(arguments)
        verb = " ".join(it for it in arguments[:2] if not it.startswith("-"))
        verbs.append(verb)
        match verb:
            case "tenants set":
                assert text == "team-a: rpm 600, tpm 400,000\n"
            case "keys create" | "keys rotate":
                team.keys.append(text.strip())
                for answer in [answer for key in team.keys for answer in team.call(key)]:
                    assert answer.status_code == 200, answer.text
                    assert answer.headers["x-ratelimit-limit-requests"] == "600"
            case "usage":
                expected = [TENANT, team.keys[0][3:15], str(len(team.urls))]
                until_s = time.monotonic() + 5
                while expected not in [line.split()[:3] for line in text.splitlines()]:
                    assert time.monotonic() < until_s, text
                    text = team.done(arguments)  # the other router reports each second
            case "keys ls":
                states = [line.split()[:4] for line in text.splitlines() if TENANT in line]
                valid = [[key[3:15], TENANT, "tenant", "valid"] for key in team.keys]
                assert sorted(states) == sorted(valid)
            case "keys revoke":
                for answer in [answer for key in team.keys for answer in team.call(key)]:
                    assert (answer.status_code, answer.json()["error"]["code"]) == (
                        401,
                        "invalid_api_key",
                    )
            case "tenants delete":
                assert text.startswith("team-a: deleted at ") and "confirmed by" in text
                assert TENANT not in team.run(["tenants", "ls"])
    assert verbs == [
        "tenants set",
        "keys create",
        "usage",
        "keys rotate",
        "keys ls",
        "keys revoke",
        "tenants delete",
    ]
