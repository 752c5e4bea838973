"""The embedded Redis: private, bounded, and gone with its parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from fleet.local.redis_check import check_external, redacted
from fleet.local.redis_server import EmbeddedRedis, RedisError
from fleet.process_key import ProcessKey


def test_it_needs_the_password_and_keeps_nothing(redis_server: EmbeddedRedis) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.config_get("save") == {"save": ""}
        assert int(client.config_get("maxmemory")["maxmemory"]) > 0
    with (
        redis.Redis(port=redis_server.port, protocol=2) as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.ping()
    command = Path(f"/proc/{redis_server.pid}/cmdline").read_text()
    assert redis_server.password not in command
    with redis.Redis(
        unix_socket_path=str(redis_server.socket_path), password=redis_server.password
    ) as local:
        assert local.ping()


def test_a_stop_leaves_no_process_and_no_folder() -> None:
    server = EmbeddedRedis()
    server.start()
    folder, process = server.socket_path.parent, ProcessKey.of(server.pid)
    server.stop()
    assert not folder.exists()
    assert process is not None and process.find() is None


def test_a_killed_one_comes_back_under_the_same_url(redis_server: EmbeddedRedis) -> None:
    url = redis_server.url
    redis_server.kill()
    assert redis_server.pid == 0
    redis_server.start()
    with redis.Redis.from_url(url) as client:
        assert client.dbsize() == 0


def test_it_dies_with_its_parent() -> None:
    program = (
        "import time; from fleet.local.redis_server import EmbeddedRedis\n"
        "s = EmbeddedRedis(); s.start(); print(s.pid, s.socket_path.parent, flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        process = ProcessKey.of(int(pid))
        assert process is not None
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 3
    while process.find() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for file in Path(folder.decode()).iterdir():
        file.unlink()
    Path(folder.decode()).rmdir()


async def test_an_external_server_is_tried_and_errors_never_show_the_password(
    redis_server: EmbeddedRedis,
) -> None:
    assert await check_external(redis_server.url) == "6.2.14"
    wrong = f"redis://:hunter2@127.0.0.1:{redis_server.port}/0"
    with pytest.raises(RedisError, match="refuses the password") as refused:
        await check_external(wrong)
    assert "hunter2" not in str(refused.value)
    with pytest.raises(RedisError, match="cannot be reached"):
        await check_external("redis://127.0.0.1:1/0")
    assert redacted(wrong) == f"redis://:***@127.0.0.1:{redis_server.port}/0"
