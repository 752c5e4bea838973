"""The tour of a request (``docs/design/reading.md``) names what exists, and stays short."""

import ast
import re

import pytest

from tests.house.imports import ROOT, imports

PAGE = ROOT / "docs" / "design" / "reading.md"
MAX_FILES = 45
MAX_LINES = 11_000
_STOP = re.compile(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)

STOPS = _STOP.findall(PAGE.read_text(encoding="utf-8"))


def test_the_tour_is_as_long_as_an_evening_or_two() -> None:
    files = [file for file, _ in STOPS]
    lines = sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files)
    assert len(files) == len(set(files)) and 30 <= len(files) <= MAX_FILES
    assert lines <= MAX_LINES, lines


@pytest.mark.parametrize(("file", "start"), STOPS)
def test_a_stop_has_the_place_to_start_at(file: str, start: str) -> None:
    inside: ast.AST = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for name in start.split("."):
        named = {getattr(node, "name", ""): node for node in ast.iter_child_nodes(inside)}
        assert name in named, f"{file} has no {start}"
        inside = named[name]


def test_each_stop_meets_another_one() -> None:
    """By an import, in either direction: nothing stands on the tour that the way does not pass."""
    graph = imports()
    modules = {file.removesuffix(".py").replace("/", ".") for file, _ in STOPS}
    lonely = {
        module
        for module in modules
        if not graph[module] & modules and not any(module in graph[other] for other in modules)
    }
    assert lonely == set()
