"""The ways that a request may take, and the cases that cover every pair of them."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import combinations, product
from typing import Any

from allpairspy import AllPairs

WAYS: dict[str, tuple[Any, ...]] = {
    "path": ("colocated", "disaggregated"),
    "prefix": ("cold", "hit", "pulled"),
    "chunk": (512, 37, 16),
    "preempted": (False, True),
    "moved": (False, True),
    "speculation": ("off", "ngram", "draft"),
    "ranks": (1, 2, 3),
    "grammar": (False, True),
    "adapter": (False, True),
    "sampling": ("greedy", "seeded"),
    "kv": ("bf16", "int8"),
}
REQUEST = ("grammar", "adapter", "sampling", "kv")
"""What may show in the tokens: part of the request or of the model. All else must not."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way through the fleet, for one request."""

    path: str
    prefix: str
    chunk: int
    preempted: bool
    moved: bool
    speculation: str
    ranks: int
    grammar: bool
    adapter: bool
    sampling: str
    kv: str

    def __str__(self) -> str:
        return "-".join(str(getattr(self, field.name)) for field in fields(self))

    @property
    def plain(self) -> "Case":
        """The same request on the shortest way: alone, whole, at once, on one rank."""
        first = {name: values[0] for name, values in WAYS.items()}
        return Case(**{**first, **{name: getattr(self, name) for name in REQUEST}})


def every_pair() -> list[Case]:
    """The covering set: every pair of values of two different ways is in one of these cases."""
    return [Case(*values) for values in AllPairs(list(WAYS.values()))]


def every_case() -> Iterator[Case]:
    """The full product."""
    return (Case(*values) for values in product(*WAYS.values()))


def sample(stride: int = 23) -> list[Case]:
    """Each ``stride``-th case of the full product; a prime that divides no way meets all values."""
    return list(every_case())[::stride]


def pairs_of(case: Case) -> set[tuple[str, Any, str, Any]]:
    """The pairs of values that a case covers."""
    return {(a, getattr(case, a), b, getattr(case, b)) for a, b in combinations(WAYS, 2)}
