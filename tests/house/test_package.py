"""The library's front door, and which names an installation puts beside a user's own."""

import subprocess
import sys
import tomllib

import pytest

import baton
from tests.house.imports import ROOT

# Prints the six lines' names, and whether `import baton` alone brought torch with it.
_LAZY = """
import sys
import baton
print("torch" in sys.modules, "numpy" in sys.modules)
from baton import SamplingParams
print("torch" in sys.modules)
from baton import LLM
print(LLM.__module__, SamplingParams.__module__)
"""


def test_an_installation_adds_one_name_of_ours_and_the_names_of_the_programs() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    packages = {path.rpartition("/")[2] for path in build["targets"]["wheel"]["packages"]}
    programs = {"router", "prefill_worker", "decode_worker", "kvtransfer", "fleet", "loadtest"}
    assert packages == {"baton", "batonpb", "baton_command.py", *programs}
    assert all((ROOT / name / "__init__.py").exists() for name in programs)


def test_the_library_is_imported_when_it_is_used() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LAZY], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines() == [
        "False False",
        "False",
        "baton.engine.llm baton.types.params",
    ]


def test_what_the_library_names_is_there() -> None:
    assert set(baton.__all__) <= set(dir(baton))
    assert all(getattr(baton, name) for name in baton.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = baton.Engine


def test_both_copies_of_a_vendored_library_are_equal() -> None:
    """The load test stands alone, so it has its own copy of what the router's page plots with."""
    page = ROOT / "router" / "frontend" / "page" / "vendor"
    reports = ROOT / "loadtest" / "results" / "vendor"
    for name in ("uPlot.iife.min.js", "uPlot.min.css", "LICENSE-uplot"):
        assert (page / name).read_bytes() == (reports / name).read_bytes()
