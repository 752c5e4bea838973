"""Commands in the guide: each exists, with the options that the guide gives it."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleet.cli.main import app
from tests.fleet.walk import GUIDE


def commands(page: Path) -> set[str]:
    """Return the commands of `baton` in a page, from its text and its blocks."""
    text = page.read_text()
    inline = re.findall(r"`(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?baton ([a-z][^`]*)`", text)
    typed = re.findall(r"^(?:[A-Z]*\$ )?baton ([a-z].*?)(?: +#.*)?$", text, re.MULTILINE)
    return {*inline, *typed}


@pytest.mark.parametrize("page", sorted(GUIDE.glob("*.md")), ids=lambda page: page.stem)
def test_each_command_exists_with_its_options(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    for command in commands(page):
        words = command.split()
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        names = [word for word in words[:2] if word.isalpha() and word.islower()]
        shown = CliRunner().invoke(app, [*names, "--help"])
        if shown.exit_code:  # the second word is an argument
            shown = CliRunner().invoke(app, [words[0], "--help"])
        assert shown.exit_code == 0, command
        assert [option for option in options if option not in shown.output] == [], command


def test_the_guide_has_commands() -> None:
    assert sum(len(commands(page)) for page in GUIDE.glob("*.md")) > 100
