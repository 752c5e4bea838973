"""The embedded Redis: private, bounded, and gone with its parent."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import redis

from fleet.local.checks.redis_check import check_external, redacted
from fleet.local.redis_server import (
    EmbeddedRedis,
    RedisError,
    RedisKeeper,
    server_program,
)
from fleet.process_key import ProcessKey
from tests.registry.redis_servers import Server, free_ports


def test_it_needs_the_password_and_keeps_nothing(redis_server: EmbeddedRedis) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.config_get("save") == {"save": ""}
        assert int(client.config_get("maxmemory")["maxmemory"]) > 0
    with (
        redis.Redis(unix_socket_path=str(redis_server.socket_path), protocol=2) as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.ping()
    command = Path(f"/proc/{redis_server.pid}/cmdline").read_text()
    assert redis_server.password not in command


def test_only_this_user_reaches_it(redis_server: EmbeddedRedis) -> None:
    folder = redis_server.socket_path.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    connections = psutil.Process(redis_server.pid).net_connections("all")
    assert {one.laddr for one in connections} <= {str(redis_server.socket_path), ""}


def test_replies_that_are_not_read_evict_nothing(redis_server: EmbeddedRedis) -> None:
    with (
        redis.Redis.from_url(redis_server.url) as client,
        contextlib.ExitStack() as held,
    ):
        client.set("kept", bytes(8 << 20))
        for _ in range(10):
            silent = held.enter_context(redis.Redis.from_url(redis_server.url)).connection_pool
            connection = silent.get_connection()
            held.callback(connection.disconnect)
            connection.send_packed_command(connection.pack_commands([("GET", "kept")] * 12))
        deadline = time.monotonic() + 20
        while len(client.client_list()) > 1:  # each asked for more than its share
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert client.exists("kept") and client.info("stats")["evicted_keys"] == 0


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


def test_a_frozen_one_is_ended_and_comes_back_under_the_same_url(
    redis_server: EmbeddedRedis,
) -> None:
    told: list[str] = []
    keeper = RedisKeeper(redis_server, told.append, look_every_s=0.02, answer_within_s=0.2)
    url, frozen = redis_server.url, ProcessKey.of(redis_server.pid)
    assert frozen is not None
    os.kill(frozen.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while redis_server.pid == frozen.pid:
        assert time.monotonic() < deadline, "nobody has noticed"
        keeper.keep(time.monotonic())
        time.sleep(0.02)
    assert frozen.find() is None
    with redis.Redis.from_url(url) as client:
        assert client.ping()
    for _ in range(10):  # a server that answers is left alone
        keeper.keep(time.monotonic())
        time.sleep(0.02)
    keeper.stop()
    assert redis_server.pid == 0
    assert len(told) == 1 and told[0].startswith("redis does not respond; restarting it")


def test_one_that_cannot_come_back_is_tried_ever_less_often_and_ends_nothing(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    keeper = RedisKeeper(redis_server, told.append)
    redis_server.kill()
    with monkeypatch.context() as broken:
        broken.setattr("fleet.local.redis_server.server_binary", lambda: "/bin/false")
        now_s, tries = 0.0, []
        while now_s < 200.0:
            before = len(told)
            keeper.keep(now_s)
            if len(told) > before:
                tries.append(now_s)
            now_s += 0.25
    assert "keep serving without Redis" in told[1]
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert pauses[:3] == [0.5, 1.0, 2.0] and pauses[-1] == 30.0
    keeper.keep(now_s + 30.0)
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.ping()
    keeper.stop()


def test_the_newest_server_on_this_machine_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundled = server_program()
    assert [int(part) for part in bundled.version.split(".")] >= [9, 1, 2]
    for name, version in (("valkey-server", "10.0.1"), ("redis-server", "8.4.0")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho {name[:-7]} server v={version} sha=0:0\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert str(server_program()) == f"valkey 10.0.1 at {tmp_path / 'valkey-server'}"
    (tmp_path / "valkey-server").write_text("not a program")
    assert server_program() == bundled


def test_a_server_that_ends_before_it_is_configured_is_reported_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(EmbeddedRedis):
        def _configuration(self) -> str:
            time.sleep(0.3)
            return super()._configuration()

    monkeypatch.setattr("fleet.local.redis_server.server_binary", lambda: "/bin/false")
    with pytest.raises(RedisError, match="did not start"):
        Slow().start()


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
    assert await check_external(redis_server.url) == "valkey 9.1.2"
    wrong = redis_server.url.replace(redis_server.password, "hunter2")
    with pytest.raises(RedisError, match="rejects the user or the password") as refused:
        await check_external(wrong)
    assert "hunter2" not in str(refused.value)
    with pytest.raises(RedisError, match="cannot be reached"):
        await check_external("redis://127.0.0.1:1/0")
    assert redacted(wrong) == f"unix://:***@{redis_server.socket_path}"


async def test_a_node_of_a_redis_cluster_is_refused_by_name(tmp_path: Path) -> None:
    port, bus = free_ports(2)  # the bus has port + 10,000 otherwise, which may not exist
    node = Server(tmp_path, port, "cluster-enabled yes", f"cluster-port {bus}")
    try:
        node.wait_up()
        with pytest.raises(RedisError, match="is a node of a Redis Cluster"):
            await check_external(f"redis://127.0.0.1:{port}/0")
    finally:
        node.kill()
