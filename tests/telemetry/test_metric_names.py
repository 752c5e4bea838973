"""What is declared is used, what is used is declared, and the labels are the declared ones.

The source is read, not run: a name is found where it stands as a literal in a call of `Metrics`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from baton.telemetry.metric_names import METRICS_BY_COMPONENT

ROOT = Path(__file__).parents[2]
PACKAGES = ("baton", "router", "prefill_worker", "decode_worker", "kvtransfer", "fleet")
KINDS = {
    "inc": {"counter", "gauge"},
    "count_up": {"counter"},
    "set": {"gauge"},
    "set_info": {"gauge"},
    "observe": {"histogram"},
    "histogram": {"histogram"},
}
VALUE_ARGUMENTS = {"name", "value", "total", "trace_id"}
DECLARED = {
    name: spec for metrics in METRICS_BY_COMPONENT.values() for name, spec in metrics.items()
}


class Use(NamedTuple):
    """One call that sets a metric."""

    place: str
    function: str
    name: str
    labels: frozenset[str] | None  # None: not literal


def uses() -> Iterator[Use]:
    """Every call whose first argument is a literal ``baton_*``, on what may be a `Metrics`."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and node.args:
                    yield from _use(node, f"{path.relative_to(ROOT)}:{node.lineno}")


def _use(call: ast.Call, place: str) -> Iterator[Use]:
    function, first = _function(call.func), call.args[0]
    if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
        return
    if not first.value.startswith(("baton_", "gen_ai_")) or function not in KINDS:
        return
    names = [keyword.arg for keyword in call.keywords]
    labels = None if None in names else frozenset(map(str, names)) - VALUE_ARGUMENTS
    yield Use(place, function, first.value, labels)


def _function(node: ast.expr) -> str:
    """``inc`` of ``inc(…)``, ``metrics.inc(…)`` and ``self.metrics.inc(…)``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


@pytest.fixture(scope="module")
def found() -> list[Use]:
    return list(uses())


def test_every_declared_metric_is_set_somewhere(found: list[Use]) -> None:
    assert sorted(DECLARED.keys() - {use.name for use in found}) == []


def test_every_metric_that_is_set_is_declared(found: list[Use]) -> None:
    assert [use for use in found if use.name not in DECLARED] == []


def test_metrics_are_set_as_their_kind_allows(found: list[Use]) -> None:
    for use in found:
        assert DECLARED[use.name].kind in KINDS[use.function], use


def test_labels_are_the_declared_ones(found: list[Use]) -> None:
    for use in found:
        if use.labels is not None:
            assert use.labels == set(DECLARED[use.name].labels), use
