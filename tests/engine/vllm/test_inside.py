"""Modules that vLLM imports in its own interpreter, with packages in place of vLLM and NIXL."""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import baton.engine.vllm.inside

FOLDER = Path(baton.engine.vllm.inside.__file__).parent


def test_the_progress_thread_of_nixl_gets_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = SimpleNamespace(nixlAgentConfig=type("nixlAgentConfig", (), {}))
    connectors = SimpleNamespace(NixlConnector=object())
    package = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
    for name, module in (
        ("nixl", SimpleNamespace(_bindings=bindings)),
        *((package.rsplit(".", n)[0], ModuleType("vllm")) for n in range(1, 6)),
        (package, connectors),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("baton_nixl")
    monkeypatch.setitem(sys.modules, "baton_nixl", module)
    assert module.NixlConnector is connectors.NixlConnector
    config = bindings.nixlAgentConfig()  # as NIXL's Python API sets it
    config.useProgThread = True
    config.pthrDelay = 0
    assert config.useProgThread
    assert config.pthrDelay == 1_000
