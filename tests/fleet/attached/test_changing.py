"""Servers that come and go while the fleet serves, and a fleet that cannot start."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest
import yaml

from baton.config.fleet_file import DEFAULT_MODEL
from benchmarks.emulated_vllm import Emulation
from fleet.local import state as fleet_state
from tests.fleet.attached.rig import (
    MODEL,
    PROMPT,
    AttachedFleet,
    Background,
    Emulated,
    ServerThread,
    expected,
)
from tests.fleet.test_up import wait_for

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(240)]
LIKE = Emulation(model=MODEL, root=f"/models/{MODEL}", token_s=0.02)


@pytest.fixture
def thread() -> Iterator[ServerThread]:
    thread = ServerThread()
    yield thread
    thread.close()


def write(file: Path, *servers: Emulated, **more: object) -> None:
    scratch = file.with_suffix(".new")
    scratch.write_text(yaml.safe_dump({"servers": [{"url": one.url, **more} for one in servers]}))
    scratch.replace(file)


@pytest.mark.costly
def test_servers_come_and_go_with_their_file(thread: ServerThread, tmp_path: Path) -> None:
    file = tmp_path / "servers.yaml"
    first = thread.start(replace(LIKE))
    write(file, first)
    fleet = AttachedFleet(tmp_path, {"file": str(file)})
    try:
        fleet.wait_ready()
        fleet.wait_for_servers(first)
        second = thread.start(replace(LIKE))
        write(file, first, second)
        fleet.wait_for_servers(first, second)
        for number in range(8):
            fleet.complete(2, [number, *range(300, 340)])
        assert second.bodies

        response = Background(lambda: fleet.complete(100))
        wait_for(lambda: any(len(body["token_ids"]) == 100 for body in all_of(first, second)), 10)
        left, stays = (first, second) if has_prompt(first) else (second, first)
        write(file, stays)
        fleet.wait_for_servers(stays)
        assert response.result() == expected(100)
        left.bodies.clear()
        assert fleet.complete(4) == expected(4)
        assert left.bodies == []
        name = left.url.removeprefix("http://")
        why = "it has left the list of servers"
        wait_for(lambda: fleet.workers()[name]["reason"] == why, 10)

        write(file, stays, drain=True)
        name = stays.url.removeprefix("http://")
        wait_for(lambda: fleet.workers()[name]["state"] == "parked", 10)
        assert "`drain: true`" in fleet.workers()[name]["reason"]
        write(file, stays, label="rack-1")
        wait_for(lambda: fleet.ready() == {"rack-1"}, 10)
        shown = baton(fleet, "status")
        assert "rack-1" in shown.stdout

        life = fleet.workers()["rack-1"]["incarnation"]
        response = Background(lambda: fleet.complete(400))
        key = tmp_path / "key"
        for text in ("first", "second"):
            key.write_text(text)
            write(file, stays, label="rack-1", key_file=str(key))
            time.sleep(5)  # it is read within 2 s
            stays.emulation.key = text
            assert fleet.complete(4) == expected(4)
            stays.emulation.key = ""  # it takes both for a while
        assert response.result() == expected(400)
        assert fleet.workers()["rack-1"]["incarnation"] == life

        refused = baton(fleet, "drain", "worker-0")
        assert refused.returncode == 1
        assert "`drain: true`" in refused.stderr
    finally:
        fleet.close()


def all_of(*servers: Emulated) -> list[dict[str, object]]:
    return [body for server in servers for body in server.bodies]


def has_prompt(server: Emulated) -> bool:
    return any(len(body["token_ids"]) == 100 for body in server.bodies)


def baton(fleet: AttachedFleet, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "fleet.cli.main", *words],
        env={**os.environ, "BATON_HOME": str(fleet.folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class Listed(NamedTuple):
    """A fleet of two servers by their addresses."""

    fleet: AttachedFleet
    servers: list[Emulated]
    thread: ServerThread


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listed]:
    thread = ServerThread()
    servers = [thread.start(replace(LIKE)) for _ in range(2)]
    fleet = AttachedFleet(tmp_path_factory.mktemp("listed"), [one.url for one in servers])
    try:
        fleet.wait_ready()
        yield Listed(fleet, servers, thread)
        processes = psutil.Process(fleet.served.process.pid).children(recursive=True)
    finally:
        fleet.close()
        thread.close()
    assert psutil.wait_procs(processes, 5)[1] == []


def test_the_process_of_the_servers_is_one_and_comes_back(
    listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, servers, _ = listed
    monkeypatch.setenv("BATON_HOME", str(fleet.folder))
    state = fleet_state.load("attached")
    assert state is not None
    supervisor = psutil.Process(state.supervisor.pid)
    programs = [json.dumps(child.cmdline()) for child in supervisor.children(recursive=True)]
    assert sum("fleet.attached.process" in program for program in programs) == 1
    assert not any("ray" in program.replace("array", "") for program in programs)
    (attached,) = [c for c in supervisor.children() if "fleet.attached.process" in c.cmdline()]
    assert "torch" not in "".join(one.path for one in attached.memory_maps())
    response = Background(lambda: fleet.complete(60))
    wait_for(lambda: any(has_prompt(one) for one in servers), 10)
    attached.send_signal(signal.SIGKILL)
    with pytest.raises(AssertionError, match="worker_lost"):  # it had all the workers
        response.result()
    fleet.wait_for_servers(*servers)
    assert fleet.complete(4) == expected(4)


@pytest.mark.costly
def test_a_running_fleet_takes_a_changed_list(listed: Listed) -> None:
    fleet, servers, thread = listed
    file = fleet.folder / "fleet.yaml"
    config = json.loads(file.read_text())
    labelled = {f"rack-{number}": one.url for number, one in enumerate(servers)}
    given = [{"url": url, "label": label} for label, url in labelled.items()]
    config["pools"]["vllm"]["servers"] = given
    file.write_text(json.dumps(config))
    reconciling = Background(lambda: baton(fleet, "up", str(file), "--reconcile"))
    while fleet.ready() != labelled.keys():  # never all at once
        assert fleet.complete(4) == expected(4)
        assert time.monotonic() - reconciling.began_s < 60
    assert reconciling.result().returncode == 0

    another, absent = (thread.start(replace(LIKE)) for _ in range(2))
    absent.stop()
    config["pools"]["vllm"]["servers"] = [another.url, absent.url]
    file.write_text(json.dumps(config))
    done = baton(fleet, "up", str(file), "--reconcile")
    assert done.returncode == 0, done.stdout + done.stderr
    fleet.wait_for_servers(another)
    assert fleet.complete(4) == expected(4)
    name = absent.url.removeprefix("http://")
    wait_for(lambda: fleet.workers().get(name, {}).get("state") == "dead", 10)
    lost = fleet.workers()[name]
    why = f"nothing listens at {absent.url}"
    assert (lost["state"], lost["pid"], lost["reason"]) == ("dead", 0, why)
    shown = baton(fleet, "status")
    assert shown.returncode == 1
    assert name in shown.stdout.split("hand-offs")[0]
    assert f"{lost['id']}: {why}" in shown.stdout
    line = re.compile(rf"{lost['id']} absent.* \({why}\)")
    wait_for(lambda: line.search(fleet.served.output.read_text()) is not None, 10)


def test_a_fleet_of_unfit_servers_does_not_start(thread: ServerThread, tmp_path: Path) -> None:
    server = thread.start(replace(LIKE, missing=frozenset(["--enable-scale-out"])))
    fleet = AttachedFleet(tmp_path, [server.url])
    assert fleet.served.process.wait(60) == 1
    assert "add `--enable-scale-out` to its `vllm serve`" in fleet.served.output.read_text()
    examined = baton(fleet, "doctor", str(tmp_path / "fleet.yaml"), "--json")
    found = {one["name"]: one for one in json.loads(examined.stdout)}
    assert "--enable-scale-out" in found[server.url.removeprefix("http://")]["text"]


def test_serve_needs_no_file_but_the_model_if_its_folder_is_elsewhere(
    thread: ServerThread, tmp_path: Path
) -> None:
    server = thread.start(replace(LIKE, root="org/tiny", model="org/tiny"))
    command = [sys.executable, "-m", "fleet.cli.main", "serve", "--attach", "http://127.0.0.1:1"]
    command += ["--attach", f"{server.url}/v1"]  # as clients spell it
    environment = {**os.environ, "BATON_HOME": str(tmp_path), "COLUMNS": "200"}
    refused = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert refused.returncode == 1
    assert "give the model with --model" in refused.stderr
    output = tmp_path / "output"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [*command, "--model", DEFAULT_MODEL, "--port", "0"],
            env=environment,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        wait_for(lambda: "Baton is ready at" in output.read_text(), 60)
        (url,) = re.findall(r"Baton is ready at (\S+)/v1", output.read_text())
        models = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
        assert [one["id"] for one in models] == ["tiny", "org/tiny"]
        body = {"model": "org/tiny", "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
        body |= {"temperature": 0, "return_token_ids": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=30)
        assert answer.json()["choices"][0]["token_ids"] == expected(4)
    finally:
        process.terminate()
        process.wait(30)
