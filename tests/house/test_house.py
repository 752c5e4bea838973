"""Structure of the tree, as ``docs/design/architecture.md`` describes it."""

import ast
import re
from collections import Counter, defaultdict

import pytest

from baton.wire.grpc_options import NO_PROXY, ROUTER_OPTIONS, WORKER_OPTIONS
from tests.house import picture
from tests.house.imports import ROOT, circles, floors, imports, modules, rooms

MIN_MODULES = 3
SMALL_FOLDERS = {
    "baton/engine/core/tiers": "the one optional part of the engine's core",
    "kvtransfer/native": "has C++ beside it",
    "router/frontend/openapi": "has a table of answers beside it",
    "router/routing/placement/native": "has C++ beside it",
}
"""Folders with fewer than three modules, and why they exist."""
MAX_LINES = 600
WARN_LINES = 450


def test_nothing_imports_in_a_circle_lazily_or_not() -> None:
    graph = imports()
    assert len(graph) > 200
    assert circles(graph) == []


@pytest.mark.parametrize(
    "package",
    [
        "",
        "baton",
        "baton.engine",
        "baton.engine.cuda",
        "router",
        "router.frontend",
        "router.routing",
        "fleet",
    ],
)
def test_no_arrow_runs_up_between_rooms(package: str) -> None:
    """Rooms can be put on floors only if no two of them reach each other."""
    assert len(floors(rooms(imports(), package))) > 1


def test_a_circle_is_found_where_there_is_one() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    with pytest.raises(ValueError, match="import each other"):
        floors({"a": {"b"}, "b": {"a"}})


def test_a_folder_of_one_or_two_modules_has_a_reason() -> None:
    folders = Counter(p.parent for p in modules().values() if p.name != "__init__.py")
    small = {str(f.relative_to(ROOT)) for f, n in folders.items() if n < MIN_MODULES}
    assert small == SMALL_FOLDERS.keys()


def test_no_two_public_classes_have_one_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        if not module.startswith("benchmarks"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(module)
    assert len(places) > 700
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_nothing_stands_behind_the_line_that_runs_a_module() -> None:
    """Run as a program, a module would not have what is defined behind it."""
    programs = {
        module: lines.index('if __name__ == "__main__":')
        for module, path in modules().items()
        if 'if __name__ == "__main__":' in (lines := path.read_text(encoding="utf-8").splitlines())
    }
    assert len(programs) > 5
    behind = {
        module: line
        for module, begin in programs.items()
        for line in modules()[module].read_text(encoding="utf-8").splitlines()[begin + 1 :]
        if line and not line.startswith(" ")
    }
    assert behind == {}


def test_no_class_has_a_word_that_the_glossary_refuses() -> None:
    """In its last column. A turn is a conversation's, so it stays where conversations are."""
    refused = re.compile(r"^class \w*(?:Mirror|Wish|Order(?!\w)|Story|Giver|Guess|Canary(?!\w))")
    named = [
        (name, line)
        for name, path in modules().items()
        for line in path.read_text(encoding="utf-8").splitlines()
        if refused.match(line) and name != "baton.engine.vllm.kv_events"
    ]
    assert named == []


def test_no_file_is_longer_than_one_reads_in_one_go() -> None:
    lengths = {
        str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in modules().values()
    }
    long = {name: length for name, length in lengths.items() if length > WARN_LINES}
    if long:
        print(f"more than {WARN_LINES} lines, so consider to cut them: {long}")
    assert {name: length for name, length in long.items() if length > MAX_LINES} == {}


def test_a_share_is_printed_with_a_space_before_the_percent_sign() -> None:
    """As ``8.5 %``; a format such as ``{share:.1%}`` prints none."""
    files = [*modules().values(), *ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("tests/**/*.py")]
    found = {path for path in files if re.search(r"\{[^{}\"\n]*:[^{}\"\n]*%\}", path.read_text())}
    assert {str(path.relative_to(ROOT)) for path in found} <= {"tests/house/test_house.py"}


def test_every_package_says_what_lives_there() -> None:
    packages = [p for p in modules().values() if p.name == "__init__.py"]
    silent = [p for p in packages if not ast.get_docstring(ast.parse(p.read_text()))]
    assert len(packages) > 20
    assert silent == []


def test_the_picture_in_the_docs_is_drawn_from_the_imports() -> None:
    shown = picture.TARGET.read_text(encoding="utf-8")
    assert shown == picture.drawing(), "run: python -m tests.house.picture"


CONNECTING = {
    **dict.fromkeys(("Client", "AsyncClient", "HTTPTransport", "AsyncHTTPTransport"), "trust_env"),
    **dict.fromkeys(("get", "post", "put", "delete", "request", "stream"), "trust_env"),
    **dict.fromkeys(("insecure_channel", "secure_channel"), "options"),
}


def test_no_call_inside_a_fleet_takes_a_proxy_from_the_environment() -> None:
    """httpx and gRPC do, and urllib always does; each call that connects says otherwise."""
    silent = []
    product = {name: file for name, file in modules().items() if name[:5] != "bench"}
    for file in product.values():
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                owner = ast.unparse(call.func.value)
                wanted = CONNECTING.get(call.func.attr, "")
                connects = owner in ("httpx", "grpc", "grpc.aio") and wanted
                if connects and wanted not in {keyword.arg for keyword in call.keywords}:
                    silent.append(f"{file}:{call.lineno}")
                if call.func.attr in ("urlopen", "build_opener"):
                    silent.append(f"{file}:{call.lineno}")
    assert silent == []
    assert all(NO_PROXY in options for options in (WORKER_OPTIONS, ROUTER_OPTIONS))
