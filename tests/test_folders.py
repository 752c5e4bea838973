"""Folders where a user has no home, or none that can be written."""

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from baton import folders
from baton.engine.compiled import cache_folder
from baton.folders import NoHomeError, cache_root, home_folder, read_small
from fleet.local.state import home, state_folder


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATON_HOME", "BATON_CACHE", "XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders._temporary.cache_clear()


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_without_a_home_the_cache_is_temporary(no_home: None, tmp_path: Path) -> None:
    own = tmp_path / f"baton-{os.getuid()}"
    assert cache_root() == own and cache_folder() == own / "native"
    assert own.stat().st_mode & 0o777 == 0o700


def test_a_temporary_folder_that_others_can_write_is_not_used(
    no_home: None, tmp_path: Path
) -> None:
    """Its libraries would be loaded."""
    own = tmp_path / f"baton-{os.getuid()}"
    own.mkdir()
    own.chmod(0o777)
    made = cache_root()
    assert made != own and made.parent == tmp_path and cache_root() == made


@pytest.mark.parametrize("writable", [True, False])
def test_a_home_that_cannot_be_written_has_no_cache(
    writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "access", lambda *_: writable)
    wanted = tmp_path / ("home/.cache/baton" if writable else f"baton-{os.getuid()}")
    assert cache_root() == wanted
    monkeypatch.setenv("BATON_CACHE", "/named")
    assert cache_root() == Path("/named")


def test_the_state_needs_a_folder_and_names_the_variable(
    no_home: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (home_folder, home):
        with pytest.raises(NoHomeError, match="has no home folder: set BATON_HOME to a folder"):
            place()
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"cannot make .* \(Not a directory\): set BATON_HOME to"):
        state_folder("fleet")
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    assert home() == tmp_path


def test_a_device_or_a_huge_file_is_no_file_of_settings(tmp_path: Path) -> None:
    """A device was read until the memory was full, and a pipe waited for."""
    pipe, huge = tmp_path / "pipe", tmp_path / "huge"
    os.mkfifo(pipe)
    with huge.open("wb") as stream:
        stream.truncate(1 << 40)
    for file in (Path("/dev/zero"), pipe, tmp_path):
        with pytest.raises(OSError, match="must be a regular file"):
            read_small(file)
    for file, piped in ((huge, False), (huge, True), (Path("/dev/zero"), True)):
        with pytest.raises(OSError, match="more than 16777216 bytes"):
            read_small(file, piped=piped)
