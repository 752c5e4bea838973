"""Packs what the steps of ``benchmarks.gpu.lease`` carry, and prints the call of each step.

    python -m benchmarks.gpu.prepare_lease [--tokens F.json] [--wheels DIR]

A call carries 64 MiB at most, the working tree included. So the model travels as two parts, the
packages that ``LLM`` needs with the first one, and all packages with the third call. All steps must
run on one machine.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from importlib.metadata import distribution, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from baton.engine.llm import DEFAULT_MODEL
from baton.model.artifact import resolve_model
from benchmarks.gpu.lease import CARRIED, STEPS, TOKENS

OWN = "baton-serve"
LIMIT_BYTES = 62 << 20  # of 64 MiB
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
LLM_PACKAGES = ("fastokens", "gguf", "llguidance", "msgspec")
UNUSED = ("jars", "rllib", "train", "tune", "llm", "dashboard/client", "core/src/ray/cpp")
"""Parts of Ray that a fleet does not use."""
_FIRST_SHARE = 0.46  # of the model: the first call also carries packages


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


def _target() -> list[str]:
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    return ["--python-version", "3.12", "--implementation", "cp", *platforms]


def download(names: Iterable[str], folder: Path) -> None:
    """Download wheels for the machine, in the versions that are installed here."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [f"{name}=={version(name)}" for name in names]
    how = ("--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder))
    command = [sys.executable, "-m", "pip", "download", *how, *_target(), *wanted]
    subprocess.run(command, check=True)


def pack(wheels: Path, site: Path, archive: Path) -> None:
    """Install wheels for the machine into ``site``, and compress it without ``UNUSED``."""
    how = ("--quiet", "--no-index", "--no-deps", "--no-compile", "--only-binary", ":all:")
    command = [sys.executable, "-m", "pip", "install", *how, *_target(), "--target", str(site)]
    subprocess.run([*command, *map(str, sorted(wheels.glob("*.whl")))], check=True)
    for part in UNUSED:
        shutil.rmtree(site / "ray" / part, ignore_errors=True)
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz", preset=4) as packed:
        packed.add(site, ".")


def describe(site: Path) -> None:
    """Write Baton's metadata: its code travels as a tree, and the router looks up its version."""
    metadata = distribution(OWN).read_text("METADATA") or ""
    described = site / f"{OWN.replace('-', '_')}-{version(OWN)}.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text(metadata)


def halve(source: Path, first: Path, second: Path) -> None:
    """Write a part of a file into each folder, and its digest into the second."""
    data = source.read_bytes()
    size = int(len(data) * _FIRST_SHARE)
    for number, (folder, part) in enumerate(((first, data[:size]), (second, data[size:]))):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{source.name}.part{number}").write_bytes(part)
    digest = hashlib.sha256(data).hexdigest()
    (second / f"{source.name}.sha256").write_text(f"{digest} 2\n")


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
    """Fill ``.lease/1`` to ``.lease/3``; print the calls."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--tokens", type=Path, help="CPU's tokens of an earlier run of this")
    parser.add_argument("--wheels", type=Path, help="folder with wheels, instead of a download")
    options = parser.parse_args(arguments)
    root = Path(CARRIED)
    shutil.rmtree(root, ignore_errors=True)
    first, second, third = (root / str(step) for step in STEPS)
    halve(resolve_model(DEFAULT_MODEL).path, first, second)
    wheels = options.wheels or root / "wheels"
    if options.wheels is None:
        download(missing_packages(), wheels)
    for name in LLM_PACKAGES:
        for wheel in wheels.glob(f"{name}-*.whl"):
            shutil.copy(wheel, first)
    describe(first / "site")
    describe(root / "site")
    pack(wheels, root / "site", third / "site.tar.xz")
    tokens = second / TOKENS
    if options.tokens is None:
        command = [sys.executable, "-m", "benchmarks.gpu.real_model", "--device", "cpu"]
        subprocess.run([*command, "--tokens-only", "--out", str(tokens)], check=True)
    else:
        shutil.copy(options.tokens, tokens)
    print("\n".join(calls(root, tree_bytes())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
