"""Secrets come from files, are read again when these change, and stand in no message."""

import os
from pathlib import Path

import pytest

from baton.config.secrets import ApiKeysFile, SecretError, read_tokens
from baton.config.watched_files import WatchedFiles

OLD, NEW = "the-old-token-of-the-fleet", "the-new-token-of-the-fleet"
KEYS = "key-of-one-tenant: one\nkey-of-operators: {role: operator}\n"


def test_a_file_that_cannot_be_used_leaves_what_was_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    file.write_text(OLD)
    watched = WatchedFiles((file,), lambda: read_tokens(file))
    file.write_text("short")
    assert watched.current == (OLD,)
    file.unlink()
    assert watched.current == watched.current == (OLD,)
    file.write_text(f"{NEW}\n{OLD}\n")
    assert watched.current == (NEW, OLD)
    assert watched.changes == 1
    assert caplog.text.count("stays in use") == 2, "once for each state of the file"
    assert OLD not in caplog.text and NEW not in caplog.text and "short\n" not in caplog.text


def test_a_link_that_is_moved_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes replaces secrets: a link to a folder points to another one."""
    for name, token in (("a", OLD), ("b", NEW)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text(token)
    (tmp_path / "now").symlink_to("a")
    file = tmp_path / "now" / "token"
    watched = WatchedFiles((file,), lambda: read_tokens(file))
    assert watched.current == (OLD,)
    (tmp_path / "next").symlink_to("b")
    (tmp_path / "next").rename(tmp_path / "now")
    assert watched.current == (NEW,)


def test_new_rights_are_a_change(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(OLD)
    modes: list[int] = []

    def read() -> int:
        modes.append(file.stat().st_mode)
        return len(modes)

    watched = WatchedFiles((file,), read)
    file.chmod(0o600)
    assert watched.current == watched.current == 2


def test_keys_are_added_and_taken_out_at_once(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    keys = ApiKeysFile(str(file))
    assert {key.tenant for key in keys.values()} == {"one", "default"}
    file.write_text(KEYS + "key-of-tomorrow: one\n")
    assert "key-of-tomorrow" in keys and len(keys) == 3
    file.write_text("key-of-tomorrow: one\n")
    assert list(keys) == ["key-of-tomorrow"]
    assert "tomorrow" not in repr(keys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("just words", "a file of API keys must consist of `key: value` lines"),
        ("secret-key-value: one\nsecret-key-value: two", r":2: a key is given twice .*line 1"),
        ("secret-key-value: {role: user, role: operator}", r":1: a key.role is given twice"),
        ("1234567812345678: one", ":1: a key: a key must be text: put it in quotes"),
        ("secret-key-value: 2024-99-99", ":1: a key: not a valid value: month must be in 1..12"),
        ("secret-key-value: {role: king}", r"a key's entry: role: Input should be 'tenant'"),
        ("short: one", "at least 8 characters"),
        ("secret-key-value: [", "not valid YAML"),
    ],
)
def test_what_is_wrong_with_a_file_of_keys_is_said_without_them(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(SecretError, match=said) as caught:
        ApiKeysFile(str(file))
    assert str(file) in str(caught.value)
    assert "secret-key-value" not in str(caught.value)


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS)
    file.chmod(0)
    user = os.geteuid()
    if user == 0:  # who reads every file
        os.seteuid(65_534)
    try:
        with pytest.raises(
            SecretError, match=f"{file}: Permission denied; .* readable by the user"
        ):
            ApiKeysFile(str(file))
    finally:
        os.seteuid(user)
