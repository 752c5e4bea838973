"""The product's modules and who imports whom, read from the source: lazy imports count too.

rooms        packages as they stand in the tree: ``baton/engine/cpu``, ``router/frontend/api``
an arrow     some module of one room imports some module of another one
"""

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "benchmarks",
    "fleet",
    "loadtest",
    "router",
    "prefill_worker",
    "decode_worker",
    "kvtransfer",
    "baton",
)

Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Every module of the product by dotted name; packages are named like their folder."""
    named = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            inner = path.relative_to(ROOT).with_suffix("")
            parts = inner.parts[:-1] if inner.name == "__init__" else inner.parts
            named[".".join(parts)] = path
    return named


@cache
def imports() -> Graph:
    """Module -> the modules of the product that it imports, wherever the statement stands."""
    known = modules()
    return {name: _imported(path, known) for name, path in known.items()}


def _imported(path: Path, known: Mapping[str, Path]) -> set[str]:
    targets: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                targets.add(inner if inner in known else node.module)
    return targets & known.keys()


def rooms(graph: Graph, package: str = "") -> Graph:
    """The graph over what lies directly in ``package`` (or at the top): its folders and modules."""
    known = modules()
    depth = package.count(".") + 1 if package else 0

    def room(module: str) -> str:
        name = ".".join(module.split(".")[: depth + 1])
        is_folder = known[name].name == "__init__.py"
        return name.rpartition(".")[2] + ("/" if is_folder else "")

    own = {m: t for m, t in graph.items() if not package or m.startswith(f"{package}.")}
    between: Graph = {room(module): set() for module in own}
    for module, targets in own.items():
        between[room(module)] |= {room(target) for target in targets if target in own}
    return {name: targets - {name} for name, targets in between.items()}


def circles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that reach each other (strongly connected, by Tarjan), sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            begin = stack.index(node)
            group = sorted(stack[begin:])
            del stack[begin:]
            if len(group) > 1:
                groups.append(group)

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(groups)


def floors(graph: Graph) -> list[list[str]]:
    """Nodes by height, the ground last: each one stands above everything that it imports.

    Raises:
        ValueError: There is a circle, so somebody would have to stand above himself.
    """
    if groups := circles(graph):
        raise ValueError(f"these import each other: {groups}")
    height: dict[str, int] = {}

    def climb(node: str) -> int:
        if node not in height:
            height[node] = 1 + max((climb(target) for target in graph[node]), default=-1)
        return height[node]

    for node in graph:
        climb(node)
    top = max(height.values(), default=-1)
    return [sorted(n for n in graph if height[n] == level) for level in range(top, -1, -1)]


def direct(graph: Graph) -> Graph:
    """Without the arrows that others imply (transitive reduction of a graph without circles)."""

    def reach(nodes: Iterable[str]) -> set[str]:
        seen: set[str] = set()
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += graph[node]
        return seen

    return {
        node: {t for t in targets if t not in reach(u for o in targets - {t} for u in graph[o])}
        for node, targets in graph.items()
    }
