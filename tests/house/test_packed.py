"""The code is unpacked: one thought a line."""

import ast
from collections.abc import Callable, Iterator

import pytest

from tests.house.imports import ROOT, modules
from tests.house.packed import packed_assignments, starred_literals

MAX_PACKED_ASSIGNMENTS = 15


def _everywhere(find: Callable[[ast.AST], Iterator[int]]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}"
        for path in modules().values()
        for line in find(ast.parse(path.read_text(encoding="utf-8")))
    ]


def test_no_call_stars_a_literal() -> None:
    assert _everywhere(starred_literals) == []


def test_few_assignments_pack_two_thoughts() -> None:
    found = _everywhere(packed_assignments)
    assert len(found) <= MAX_PACKED_ASSIGNMENTS, found


@pytest.mark.parametrize(
    ("source", "is_packed"),
    [
        ("a, b = x, y", True),
        ("a, self.b = self.b, None", True),
        ("a, b = b, a", False),
        ("a, b = pair", False),
        ("a = x, y", False),
    ],
)
def test_packed_assignments_are_found(source: str, *, is_packed: bool) -> None:
    assert bool(list(packed_assignments(ast.parse(source)))) is is_packed


@pytest.mark.parametrize(
    ("source", "is_starred"),
    [
        ("f(*(a, b), c)", True),
        ("f(*[a, b][:n])", True),
        ('f(**{"a": b})', True),
        ("f(*a)", False),
        ('f(**{**a, "b": c})', False),
        ("[*(a, b)]", False),
    ],
)
def test_starred_literals_are_found(source: str, *, is_starred: bool) -> None:
    assert bool(list(starred_literals(ast.parse(source)))) is is_starred
