"""Processes of a vLLM worker: none outlives the shell, and a start that fails says why."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from baton.engine.process.client import EngineClient
from baton.engine.settings import EngineSettings, ExternalEngine
from baton.engine.vllm import server
from baton.engine.vllm.interpreter import vllm_version
from baton.types.errors import InternalError

SHELL = """
import asyncio, sys
from baton.engine.process.client import EngineClient
from baton.engine.settings import EngineSettings, ExternalEngine
external = ExternalEngine(kind="vllm", python=sys.argv[2])
asyncio.run(EngineClient.start(EngineSettings(model=sys.argv[1], external=external)))
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    return str(folder)


def program(tmp_path: Path, text: str) -> str:
    file = tmp_path / "python"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def start(model: str, python: str) -> EngineSettings:
    return EngineSettings(model=model, external=ExternalEngine(kind="vllm", python=python))


async def test_a_missing_interpreter_is_named(model: str) -> None:
    with pytest.raises(InternalError, match=r"cannot execute /nowhere/python.*pools.vllm.python"):
        await EngineClient.start(start(model, "/nowhere/python"))


async def test_a_server_that_does_not_start_is_reported(tmp_path: Path, model: str) -> None:
    with pytest.raises(InternalError, match="`vllm serve` exited with code 3"):
        await EngineClient.start(start(model, program(tmp_path, "exit 3")))


async def test_a_gguf_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(InternalError, match="load a Hugging Face directory"):
        await EngineClient.start(start(str(file), "/nowhere/python"))


@pytest.mark.parametrize("victim", ["shell", "process", "both"])
def test_nothing_of_the_group_outlives_a_killed_process(
    tmp_path: Path, model: str, victim: str
) -> None:
    python = program(tmp_path, "sleep 600 &\nexec sleep 601")
    shell = subprocess.Popen([sys.executable, "-c", SHELL, model, python], stderr=subprocess.PIPE)
    try:
        own = psutil.Process(shell.pid)
        until(lambda: len(own.children(recursive=True)) >= 3)
        (process,) = own.children()
        group = own.children(recursive=True)
        assert {os.getpgid(one.pid) for one in group} == {process.pid}
        until(lambda: [one.pid for one in group if "sleep 601" in " ".join(one.cmdline())])
        victims = {"shell": [own], "process": [process], "both": [own, process]}
        for one in victims[victim]:
            one.suspend()  # neither may see the end of the other
        for one in victims[victim]:
            one.kill()
        _, alive = psutil.wait_procs(group, timeout=20)
        assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        shell.kill()
        shell.communicate()


def test_an_interpreter_without_the_package_of_the_hand_off_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm/entrypoints/scale_out/token_in_token_out").mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").touch()
    own = tmp_path / "vllm-0.32.0.dist-info"
    own.mkdir()
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert vllm_version(sys.executable) == f"0.32.0 at {sys.executable}"
    with pytest.raises(RuntimeError, match="hand_off: nixl needs the package nixl there"):
        vllm_version(sys.executable, "nixl")
    newer = (own / "METADATA").read_text().replace("0.32.0", "0.99.0")
    (own / "METADATA").write_text(newer)
    assert "vLLM 0.99.0 is not a version that Baton was tested" in vllm_version(sys.executable)


def test_an_interpreter_without_vllm_is_named() -> None:
    with pytest.raises(RuntimeError, match="vLLM is not installed there"):
        vllm_version(sys.executable)
    with pytest.raises(RuntimeError, match=r"/nowhere/python cannot run"):
        vllm_version("/nowhere/python")


# ---------------------------------------------------------------- hand-offs


def external(**changes: str) -> ExternalEngine:
    return ExternalEngine(kind="vllm", python="python", **changes)


def test_a_hand_off_sets_the_connector_and_the_addresses_of_this_worker() -> None:
    engine = external(hand_off="nixl", address="10.0.0.7:5600", ports="7000-7100")
    settings = EngineSettings(model="m", external=engine)
    line = server.command(engine, settings, Path("/m"), Path("/f"))
    config = msgspec.json.decode(line[line.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == "NixlConnector"
    assert config["kv_load_failure_policy"] == "fail"
    assert config["kv_role"] == "kv_both"
    sender = server.command(external(hand_off="nixl", role="prefill"), settings, Path(), Path())
    assert '"kv_role":"kv_producer"' in sender[sender.index("--kv-transfer-config") + 1]
    variables = server.environment({}, 1, engine)
    connector = Path(variables["PYTHONPATH"]) / f"{config['kv_connector_module_path']}.py"
    assert "NixlConnector" in connector.read_text()
    assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.7"
    assert variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert variables["UCX_TCP_PORT_RANGE"] == "7000-7100"
    assert "UCX_NET_DEVICES" not in variables
    own = server.environment({"UCX_TCP_PORT_RANGE": "1-2"}, 1, engine)
    assert own["UCX_TCP_PORT_RANGE"] == "1-2"


def test_a_fleet_on_one_host_opens_no_port_to_others() -> None:
    engine = external(hand_off="nixl", address="127.0.0.1:5600")
    assert server.environment({}, 1, engine)["UCX_NET_DEVICES"] == "lo"


def test_without_a_hand_off_vllm_gets_no_connector() -> None:
    engine = external()
    settings = EngineSettings(model="m", external=engine)
    assert "--kv-transfer-config" not in server.command(engine, settings, Path("/m"), Path("/f"))
    assert not [name for name in server.environment({}, 1, engine) if "NIXL" in name]


def test_vllm_imports_our_extension_beside_the_modules_of_an_outer_path() -> None:
    engine = external()
    settings = EngineSettings(model="m", external=engine)
    line = server.command(engine, settings, Path("/m"), Path("/f"))
    module, _, name = line[line.index("--worker-extension-cls") + 1].partition(".")
    variables = server.environment({"PYTHONPATH": "/outer"}, 1, engine)
    inside, outer = variables["PYTHONPATH"].split(":")
    assert f"class {name}:" in (Path(inside) / f"{module}.py").read_text()
    assert outer == "/outer"
