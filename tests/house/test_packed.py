"""The code is unpacked: one thought a line."""

import ast

import pytest

from tests.house.imports import ROOT, modules
from tests.house.packed import packed_assignments, starred_literals

MAX_PACKED_ASSIGNMENTS = 15


def test_no_call_stars_a_literal_and_few_assignments_pack_two_thoughts() -> None:
    starred, packed = [], []
    for path in modules().values():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        starred += [f"{path.relative_to(ROOT)}:{line}" for line in starred_literals(tree)]
        packed += [f"{path.relative_to(ROOT)}:{line}" for line in packed_assignments(tree)]
    assert starred == []
    assert len(packed) <= MAX_PACKED_ASSIGNMENTS, packed


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
