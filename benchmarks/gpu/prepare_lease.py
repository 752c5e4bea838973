"""Packs what the steps of ``benchmarks.gpu.lease`` carry, and prints the call of each step.

    python -m benchmarks.gpu.prepare_lease [--tokens F.json] [--wheels DIR]

A call carries 64 MiB at most, the working tree included. So the model and ray travel as halves in
two calls each, and all steps must run on one machine.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import distribution, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from baton.engine.llm import DEFAULT_MODEL
from baton.model.artifact import resolve_model
from benchmarks.gpu.lease import CARRIED, STEPS, TOKENS

OWN = "baton-serve"
LIMIT_BYTES = 60 << 20  # of 64 MiB: some are for the tree's own growth
PYTHON = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}
GLIBC_MINORS = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)
PLATFORMS = (
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
    *(f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS),
)
# Packages of the machine's image that Baton uses, as listed for it on 2026-11-17. Generated code
# needs recent versions of grpcio and protobuf, so they are carried.
_IMAGE = """
    annotated-doc anyio attrs certifi charset-normalizer click filelock fsspec h11 hf-xet
    httpcore httpx huggingface-hub idna jinja2 markdown-it-py markupsafe mdurl mpmath msgpack
    networkx numpy packaging prometheus-client psutil pygments pyyaml requests rich safetensors
    setuptools shellingham sympy tokenizers torch tqdm typer typing-extensions urllib3 uvloop
    xxhash
"""
IMAGE = frozenset(_IMAGE.split())


class TooLargeError(RuntimeError):
    """A call would carry more than its limit."""


def missing_packages() -> list[str]:
    """Return the packages that the image lacks, of all that Baton needs."""
    seen: set[str] = set()
    waiting = [OWN]
    while waiting:
        name = waiting.pop()
        if name in seen or name in IMAGE:
            continue
        seen.add(name)
        waiting += _needs(name)
    return sorted(seen - {OWN})


def _needs(name: str) -> Iterable[str]:
    for line in requires(name) or ():
        needed = Requirement(line)
        if needed.marker is None or needed.marker.evaluate(PYTHON):
            yield canonicalize_name(needed.name)
            if "hiredis" in needed.extras:  # of redis; no other extra is a package of its own
                yield "hiredis"


def download(names: Iterable[str], folder: Path) -> None:
    """Download wheels for the machine, in the versions that are installed here."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [f"{name}=={version(name)}" for name in names]
    target = ("--python-version", "3.12", "--implementation", "cp", "--only-binary", ":all:")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *target]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, "--dest", str(folder), *wanted], check=True)


def describe(folder: Path) -> None:
    """Write Baton's metadata: its code travels as a tree, and the router looks up its version."""
    metadata = distribution(OWN).read_text("METADATA") or ""
    described = folder / "site" / f"{OWN.replace('-', '_')}-{version(OWN)}.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text(metadata)


def halve(source: Path, folders: Sequence[Path]) -> None:
    """Write a part of a file into each folder, and its digest into the last."""
    data = source.read_bytes()
    size = -(-len(data) // len(folders))
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True, exist_ok=True)
        part = data[number * size : (number + 1) * size]
        (folder / f"{source.name}.part{number}").write_bytes(part)
    digest = hashlib.sha256(data).hexdigest()
    (folders[-1] / f"{source.name}.sha256").write_text(f"{digest} {len(folders)}\n")


def size_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def tree_bytes() -> int:
    """Return the bytes of the files of this checkout that every call carries."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in listed.split("\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def calls(root: Path, tree: int) -> list[str]:
    """Return the call of each step.

    Raises:
        TooLargeError: A step's folder and the tree exceed the limit.
    """
    lines = []
    for step in STEPS:
        folder = root / str(step)
        carried = size_bytes(folder)
        if tree + carried > LIMIT_BYTES:
            raise TooLargeError(
                f"step {step} carries {carried >> 20} MiB beside {tree >> 20} MiB of the working "
                f"tree, limit {LIMIT_BYTES >> 20} MiB: remove files from {folder} or the tree"
            )
        carry = f', carry=["{folder}"]' if carried else ""
        lines.append(
            f'run(command="python3 -m benchmarks.gpu.lease {step}", timeout_s=600{carry})'
            f"   # {(tree + carried) >> 20} MiB"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill ``.lease/1`` to ``.lease/5``; print the calls."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--tokens", type=Path, help="CPU's tokens of an earlier run of this")
    parser.add_argument("--wheels", type=Path, help="folder with wheels, instead of a download")
    options = parser.parse_args(arguments)
    root = Path(CARRIED)
    shutil.rmtree(root, ignore_errors=True)
    folders = {step: root / str(step) for step in STEPS}
    wheels = options.wheels or root / "wheels"
    if options.wheels is None:
        download(missing_packages(), wheels)
    for wheel in wheels.glob("*.whl"):
        if wheel.name.startswith("ray-"):
            halve(wheel, [folders[4], folders[5]])
        else:
            folders[3].mkdir(parents=True, exist_ok=True)
            shutil.copy(wheel, folders[3])
    describe(folders[3])
    halve(resolve_model(DEFAULT_MODEL).path, [folders[1], folders[2]])
    tokens = folders[3] / TOKENS
    if options.tokens is None:
        command = [sys.executable, "-m", "benchmarks.gpu.real_model", "--device", "cpu"]
        subprocess.run([*command, "--tokens-only", "--out", str(tokens)], check=True)
    else:
        shutil.copy(options.tokens, tokens)
    print("\n".join(calls(root, tree_bytes())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
