"""What a fleet writes is whole, for its user alone, and stays for as long as it runs."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.local import state as fleet_state
from fleet.local.fleet_token import fleet_token
from fleet.local.log_files import rotate
from fleet.local.redis_server import EmbeddedRedis
from fleet.local.router_process import RouterProcesses

ENTERS = """
import sys, time
from pathlib import Path
from fleet.local import state
state.enter(Path(sys.argv[1]))
print(flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With the mask that most shells have."""
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    for name in ("BATON_FLEET_TOKEN", "BATON_FLEET_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    before = os.umask(0o022)
    yield tmp_path
    os.umask(before)


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_logs_are_for_their_user_alone(home: Path) -> None:
    """With `logs: {dir: …}` they lie where others look; texts of `log_text` keys are in them."""
    redis = EmbeddedRedis(log_file=home / "redis.log")
    redis.start()
    redis.stop()
    routers = RouterProcesses("127.0.0.1", 0)
    routers.start(home / "no.yaml", os.environ, home / "group", home)
    routers.begin_stop()
    routers.finish_stop(5.0)
    (home / "decode-0.log").write_bytes(b"x" * 200_000)
    (home / "decode-0.log").chmod(0o600)
    made: list[int] = []
    real_open = os.open

    def watched(*arguments: object, **more: object) -> int:
        descriptor = real_open(*arguments, **more)  # type: ignore[arg-type]
        made.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return descriptor

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "open", watched)
        rotate(home, limit_bytes=100_000)
    assert set(made) == {0o600}, "not for an instant is the copy open to others"
    assert {file.name: mode(file) for file in home.glob("*.log*")} == {
        "redis.log": 0o600,
        "router.log": 0o600,
        "decode-0.log": 0o600,
        "decode-0.log.1": 0o600,
    }


def test_a_log_that_an_operator_has_opened_to_others_stays_so(home: Path) -> None:
    (home / "redis.log").touch(mode=0o640)
    redis = EmbeddedRedis(log_file=home / "redis.log")
    redis.start()
    redis.stop()
    assert mode(home / "redis.log") == 0o640


def test_a_disk_that_is_full_leaves_no_half_token(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty one would be refused at every start from then on."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(os, "fsync", full)
        fleet_token("f")
    assert not (home / "f" / "fleet.token").exists()
    (home / "f" / "fleet.token").touch()  # as earlier versions left it
    made = fleet_token("f")
    assert len(made.token) > 30 and fleet_token("f") == made
    assert mode(home / "f" / "fleet.token") == 0o600


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="no systemd-tmpfiles here")
@pytest.mark.parametrize("runs", [True, False])
def test_the_folder_of_a_fleet_that_runs_is_not_cleaned_away(home: Path, runs: bool) -> None:
    """By default it takes what nobody has touched for ten days; here, for a second."""
    run_folder = home / "aged" / "bt-run"
    (run_folder / "r").mkdir(parents=True)
    (run_folder / "r" / "node_ip_address.json").touch()
    rules = home / "rules.conf"
    rules.write_text(f"d {home / 'aged'} 0755 - - 1s\n")
    program = ENTERS if runs else "import time; print(flush=True); time.sleep(60)"
    command = [sys.executable, "-c", program, str(run_folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as fleet:
        assert fleet.stdout is not None
        fleet.stdout.readline()
        time.sleep(2.5)
        subprocess.run(["systemd-tmpfiles", "--clean", str(rules)], check=True)
        fleet.kill()
    assert (run_folder / "r" / "node_ip_address.json").exists() is runs
    assert fleet_state.load_all() == []
