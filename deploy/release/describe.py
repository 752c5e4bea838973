"""Write SBOM and checksums of a folder of wheels: ``python -m deploy.release.describe dist [KEY]``.

The SBOM is CycloneDX 1.5 as JSON: Baton, all packages that it needs at run time, in the versions
that are installed here and were tested, and the Valkey server in one of them. The hashes of a
package are those of all its files that the lock files accept.
"""

import hashlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from model_signing import signing
from packaging.markers import default_environment
from packaging.requirements import Requirement

from baton.telemetry.version import version
from fleet.local.redis_server import bundled_program

PACKAGE = "baton-serve"
SBOM = "sbom.cdx.json"
SUMS = "SHA256SUMS"
SIGNATURE = "SHA256SUMS.sig"
_ROOT = Path(__file__).parents[2]
_LOCKED = re.compile(r"^([a-z0-9-]+)==([^ ;]+).*\\\n((?: +--hash=.*\n)+)", re.MULTILINE)


def locked(lock: str) -> dict[tuple[str, str], list[str]]:
    """Return the SHA-256 sums of each name and version in a lock file of the repository."""
    entries = _LOCKED.findall((_ROOT / lock).read_text(encoding="ascii"))
    return {
        (name, version): re.findall(r"sha256:([0-9a-f]{64})", sums)
        for name, version, sums in entries
    }


def runtime_packages() -> dict[str, importlib.metadata.Distribution]:
    """Return the distributions that Baton needs, itself included, by normalised name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [(PACKAGE, frozenset[str]())]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        wanted, extras = waiting.pop()
        key = _normalised(wanted)
        if (key, extras) in seen:
            continue
        seen.add((key, extras))
        found[key] = distribution = importlib.metadata.distribution(wanted)
        for line in distribution.requires or []:
            requirement = Requirement(line)
            if _applies(requirement, extras):
                waiting.append((requirement.name, frozenset(requirement.extras)))
    return found


def _applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    marker = requirement.marker
    environment = {**default_environment()}
    return marker is None or any(
        marker.evaluate({**environment, "extra": extra}) for extra in ("", *extras)
    )


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def sbom() -> dict[str, Any]:
    """Return the SBOM of this installation."""
    packages = runtime_packages()
    sums = locked("requirements.lock") | locked("requirements-cpu.lock")
    own = _component(packages.pop(PACKAGE), {}) | {"version": version(), "type": "application"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": own},
        "components": [*(_component(packages[name], sums) for name in sorted(packages)), _valkey()],
    }


def _valkey() -> dict[str, Any]:
    program = bundled_program()
    digest = hashlib.sha256(program.file.read_bytes()).hexdigest()
    return {
        "type": "application",
        "name": "valkey-server",
        "version": program.version,
        "purl": f"pkg:github/valkey-io/valkey@{program.version}",
        "licenses": [{"expression": "BSD-3-Clause"}],
        "hashes": _hashes([digest]),
    }


def _component(
    distribution: importlib.metadata.Distribution, sums: dict[tuple[str, str], list[str]]
) -> dict[str, Any]:
    name = _normalised(distribution.metadata["Name"])
    component: dict[str, Any] = {
        "type": "library",
        "name": name,
        "version": distribution.version,
        "purl": f"pkg:pypi/{name}@{distribution.version}",
    }
    if found := sums.get((name, distribution.version)):
        component["hashes"] = _hashes(found)
    if license_ := distribution.metadata.get("License-Expression"):
        component["licenses"] = [{"expression": license_}]
    return component


def _hashes(sums: list[str]) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": one} for one in sums]


def write(folder: Path) -> None:
    """Write ``sbom.cdx.json`` and ``SHA256SUMS`` of a folder's files."""
    (folder / SBOM).write_text(json.dumps(sbom(), indent=2) + "\n", encoding="utf-8")
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != SUMS)
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (folder / SUMS).write_text("".join(lines), encoding="ascii")


def sign(folder: Path, key: Path) -> None:
    """Sign the folder's ``SHA256SUMS`` with the private elliptic-curve key in a file."""
    signer = signing.Config().use_elliptic_key_signer(private_key=key)
    signer.sign(folder / SUMS, folder / SIGNATURE)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    for key_file in sys.argv[2:]:
        sign(Path(sys.argv[1]), Path(key_file))
