"""Write SBOM and checksums of a folder of wheels: ``python -m deploy.release.describe dist``.

The SBOM is CycloneDX 1.5 as JSON: Baton, all packages that it needs at run time, in the versions
that are installed here and were tested, and the Valkey server in one of them.
"""

import hashlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement

from baton.telemetry.version import version
from fleet.local.redis_server import bundled_program

PACKAGE = "baton-serve"
SBOM = "sbom.cdx.json"
SUMS = "SHA256SUMS"


def runtime_packages(name: str = PACKAGE) -> dict[str, importlib.metadata.Distribution]:
    """Return the distributions that a package needs, itself included, by normalised name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [(name, frozenset[str]())]
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
    own = _component(packages.pop(PACKAGE)) | {"version": version(), "type": "application"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": own},
        "components": [*(_component(packages[name]) for name in sorted(packages)), _valkey()],
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
        "hashes": [{"alg": "SHA-256", "content": digest}],
    }


def _component(distribution: importlib.metadata.Distribution) -> dict[str, Any]:
    name = _normalised(distribution.metadata["Name"])
    component: dict[str, Any] = {
        "type": "library",
        "name": name,
        "version": distribution.version,
        "purl": f"pkg:pypi/{name}@{distribution.version}",
    }
    if license_ := distribution.metadata.get("License-Expression"):
        component["licenses"] = [{"expression": license_}]
    return component


def write(folder: Path) -> None:
    """Write ``sbom.cdx.json`` and ``SHA256SUMS`` of a folder's files."""
    (folder / SBOM).write_text(json.dumps(sbom(), indent=2) + "\n", encoding="utf-8")
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != SUMS)
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (folder / SUMS).write_text("".join(lines), encoding="ascii")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
