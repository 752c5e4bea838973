"""Lines that pack more than one thought: found by their syntax, in any of the product's modules."""

import ast
from collections.abc import Iterator


def packed_assignments(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of ``a, b = x, y``, swaps left out."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, (ast.Tuple, ast.List)):
            continue
        target = node.targets[0]
        if isinstance(target, (ast.Tuple, ast.List)) and not _same_parts(target, node.value):
            yield node.lineno


def _same_parts(one: ast.Tuple | ast.List, other: ast.Tuple | ast.List) -> bool:
    return sorted(map(ast.unparse, one.elts)) == sorted(map(ast.unparse, other.elts))


def starred_literals(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of ``f(*(a, b))`` and ``f(**{"a": b})``.

    A literal that merges other mappings, ``**{**defaults, "a": b}``, is no packing: it overrides.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        for argument in node.args:
            if isinstance(argument, ast.Starred) and _is_literal(argument.value):
                yield argument.lineno
        for keyword in node.keywords:
            value = keyword.value
            if keyword.arg is None and isinstance(value, ast.Dict) and None not in value.keys:
                yield value.lineno


def _is_literal(node: ast.expr) -> bool:
    if isinstance(node, ast.Subscript):  # a part of a literal
        node = node.value
    return isinstance(node, (ast.Tuple, ast.List, ast.Set))
