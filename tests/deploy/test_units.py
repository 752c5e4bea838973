"""The units for systemd are such; what they run, tests/hosts runs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.cli.lifecycle import _DOWN_LIMIT_S
from fleet.local.supervisor import START_LIMIT_S

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = ("baton.service", "baton-ray-head.service", "baton-ray-node.service")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("name", UNITS)
def test_systemd_finds_nothing_wrong(name: str, tmp_path: Path) -> None:
    """With programs that are there: it looks for them."""
    text = re.sub(r"/opt/baton/bin/(ray|baton)", sys.executable, (DEPLOY / name).read_text())
    (tmp_path / name).write_text(text)
    command = [
        "systemd-analyze",
        "verify",
        "--man=no",
        "--recursive-errors=no",
        str(tmp_path / name),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", UNITS[1:])
def test_ray_comes_again_after_whatever_ended_it(name: str) -> None:
    text = (DEPLOY / name).read_text()
    assert "Restart=always" in text and "--block" in text and "RAY_AUTH_MODE=token" in text
    assert "StartLimitIntervalSec=0" in text, (
        "a head that is away for long must not end it for good"
    )


def test_a_reload_waits_for_the_change_and_tells_its_end() -> None:
    """A bare SIGUSR1 tells nothing, and ends a `baton up` that has no handler for it yet."""
    lines = dict(
        line.split("=", 1)
        for line in (DEPLOY / "baton.service").read_text().splitlines()
        if re.match(r"[A-Z]\w+=", line)
    )
    assert lines["ExecReload"] == f"{lines['ExecStart']} --reconcile"
    assert int(lines["TimeoutStartSec"]) > START_LIMIT_S, "as long as `--reconcile` waits"
    assert int(lines["TimeoutStopSec"]) > _DOWN_LIMIT_S
