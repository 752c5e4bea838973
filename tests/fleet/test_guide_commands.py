"""Commands in the guide: each exists, with the options that the guide gives it."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command
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
        assert surplus(command) == [], command


def surplus(text: str) -> list[str]:
    """Return the arguments that a command of the guide has beyond those that it takes."""
    typed = re.sub(r"\$\([^)]*\)", "X", text)
    words = shlex.split(re.sub(r"[\[\]…&]|[|>].*", " ", typed))
    command = get_command(app)
    context = command.context_class(command, info_name="baton")
    while words and hasattr(command, "get_command"):
        found = command.get_command(context, words[0])
        assert found is not None, text
        command = found
        context = command.context_class(command, parent=context, **command.context_settings)
        words = words[1:]
    if words and words[-1].startswith("-"):  # the text may name an option without its value
        words.pop()
    rest: list[str] = command.make_parser(context).parse_args(words)[1]
    return [] if context.allow_extra_args else rest


def test_an_argument_too_many_is_found() -> None:
    assert surplus("usage TENANT --by tenant") == ["TENANT"]
    assert surplus("drain WORKER") == []


def test_the_guide_has_commands() -> None:
    assert sum(len(commands(page)) for page in GUIDE.glob("*.md")) > 100
