"""The table of Redis keys in ``baton/registry/redis_store.py`` has every key of the code."""

import ast
import re
from collections.abc import Iterator

from baton.registry import redis_store
from tests.house.imports import ROOT

FOLDERS = ("baton", "router", "fleet", "decode_worker", "prefill_worker")


def listed() -> list[re.Pattern[str]]:
    """Patterns of the keys in the table, and of their stems."""
    patterns = []
    name = r"(?:<[^>]*>|[^\s<,])+"
    for line in (redis_store.__doc__ or "").splitlines():
        if match := re.match(rf" {{4}}({name}(?:, {name})*)", line):
            for key in match[1].split(", "):
                for stem in filter(None, (key, key.rpartition(":")[0])):
                    parts = re.split(r"<[^>]*>|…", stem)
                    patterns.append(re.compile(".*".join(map(re.escape, parts))))
    return patterns


def text_of(node: ast.expr) -> str:
    """Constant text of an argument, with X for what is not constant."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    return "X"


def keys_of(tree: ast.AST) -> Iterator[str]:
    """Keys that a module names: ``key("family", …)``, or the name of a table."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            first = node.args[0] if node.args else None
            if re.search(r"(?:^|\.)key$", function) and not isinstance(first, ast.Name | None):
                yield ":".join(map(text_of, node.args))
        if isinstance(node, ast.ClassDef) and "VersionedTable[" in ast.unparse(node):
            yield from re.findall(r"super\(\).__init__\(registry, '([^']*)'", ast.unparse(node))


def test_the_table_of_redis_keys_is_complete() -> None:
    patterns = listed()
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    users = [file for file in files if "registry" in file.read_text("utf-8")]
    keys = {(key, file.name) for file in users for key in keys_of(ast.parse(file.read_text()))}
    families = {key.partition(":")[0] for key, _ in keys}
    assert {"quotas", "tenants", "gate", "usage", "audit", "plan", "slot"} <= families
    missing = [
        (key, file) for key, file in keys if not any(known.fullmatch(key) for known in patterns)
    ]
    assert missing == []
