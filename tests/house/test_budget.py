"""The product stays within its budget (``budget.py``)."""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.house import budget
from tests.house.imports import ROOT, modules

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
LONG_FILE = 450
LONG_FUNCTION = 60
WIDE_FUNCTION = 7


def _product() -> list[Path]:
    return [path for name, path in modules().items() if not name.startswith("benchmarks")]


class _Function(NamedTuple):
    place: str
    lines: int
    parameters: int


@cache
def _functions() -> list[_Function]:
    return [
        _Function(
            f"{path.relative_to(ROOT)}: {node.name}",
            (node.end_lineno or 0) - node.lineno + 1,
            _width(node),
        )
        for path in _product()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, FunctionNode)
    ]


def _width(function: FunctionNode) -> int:
    arguments = function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_the_product_is_within_its_lines() -> None:
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in _product())
    assert lines <= budget.PRODUCT_LINES, "a new feature of a thousand lines removes something"
    assert lines > budget.PRODUCT_LINES - 1_500, "lower the budget to what is left"


def test_few_files_are_long() -> None:
    long = [path for path in _product() if len(path.read_text().splitlines()) > LONG_FILE]
    assert len(long) <= budget.LONG_FILES, "\n".join(map(str, long))


def test_few_functions_are_long() -> None:
    long = [each.place for each in _functions() if each.lines > LONG_FUNCTION]
    assert len(long) <= budget.LONG_FUNCTIONS, "\n".join(long)


def test_few_functions_have_many_parameters() -> None:
    wide = [each.place for each in _functions() if each.parameters >= WIDE_FUNCTION]
    assert len(wide) <= budget.WIDE_FUNCTIONS, "\n".join(wide)
