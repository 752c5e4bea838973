"""The lock files: complete, with hashes, and inside the ranges of ``pyproject.toml``."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from deploy.release.describe import locked

ROOT = Path(__file__).parents[2]
LOCKS = sorted(file.name for file in ROOT.glob("requirements*.lock"))
INSTALLERS = [
    "Makefile",
    *(
        f"deploy/{name}"
        for name in (
            "Dockerfile",
            "Dockerfile.vllm",
            "ray-cluster-local.yaml",
            "ray-cluster-aws.yaml",
        )
    ),
]


def ranges(*extras: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in extras for line in optional[extra])]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("lock", LOCKS)
def test_every_line_has_one_version_and_hashes(lock: str) -> None:
    text = (ROOT / lock).read_text()
    starts = [line for line in text.splitlines() if not line.startswith("    --hash=sha256:")]
    found = locked(lock)
    assert starts
    assert len(starts) == len(found), "a line without version or hash"
    assert all(found.values())
    assert "://" not in text, "no address: names have one source"


@pytest.mark.parametrize(
    ("lock", "extras"), [("requirements.lock", ()), ("requirements-dev.lock", ("dev", "signing"))]
)
def test_a_lock_satisfies_the_ranges(lock: str, extras: tuple[str, ...]) -> None:
    versions: dict[str, list[str]] = {}
    for name, version in locked(lock):
        versions.setdefault(name, []).append(version)
    for wanted in ranges(*extras):
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        assert name in versions, f"{name} is not in {lock}: run `make lock`"
        assert all(map(wanted.specifier.contains, versions[name])), f"{wanted}: run `make lock`"


def test_the_locks_agree() -> None:
    runtime, dev, cpu = map(
        locked, ("requirements.lock", "requirements-dev.lock", "requirements-cpu.lock")
    )
    assert runtime.items() <= dev.items(), "the tests run what is served"
    assert cpu.keys() == {
        ("torch", f"{version}+cpu") for name, version in runtime if name == "torch"
    }
    described = tomllib.loads((ROOT / "deploy/release/uv.toml").read_text())["dependency-metadata"]
    assert {(one["name"], one["version"]) for one in described} <= runtime.keys()


def test_bounds_that_safety_needs() -> None:
    lower = {one.name: str(one.specifier) for one in ranges()}
    assert lower["ray"] == ">=2.52", "the first with a token"
    assert lower["jinja2"] == ">=3.1.6", "earlier sandboxes have holes"


@pytest.mark.parametrize("file", INSTALLERS)
def test_packages_are_installed_by_hash_only(file: str) -> None:
    text = (ROOT / file).read_text()
    if file.endswith("yaml"):
        text = "\n".join(yaml.safe_load(text)["setup_commands"])
    text = text.replace("\\\n", " ")
    assert "EXTRA_INDEX_URL" not in text
    assert "--extra-index-url" not in text
    steps = re.split(r"&&|\n", text)
    installs = [
        step for step in steps if re.search(r"pip install .|call pip,.*,--|call pip,.*-e", step)
    ]
    tools = "$(TOOLS)/python"
    assert installs
    for step in installs:
        if tools not in step and "define" not in step:
            assert "--no-deps" in step or "$(2)" in step, step
            assert (
                "--require-hashes" in step or ".whl" in step or "-e ." in step or "$(2)" in step
            ), step
