"""A vLLM that says it has another version: its worker tests it at the start (`make test-vllm`)."""

from pathlib import Path

import pytest

from baton.engine.process.client import EngineClient
from baton.engine.settings import EngineSettings, ExternalEngine
from tests.vllm.places import ARGS, MODEL, PYTHON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment"),
]
PROGRAM = """
import runpy, sys
import vllm.version
vllm.version.__version__ = "0.99.0"
if __name__ == "__main__":
    sys.argv = sys.argv[2:]
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__")
"""


@pytest.mark.parametrize("hand_off", ["baton", ""])
async def test_an_untested_version_starts_after_its_self_test(
    tmp_path: Path,
    hand_off: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("BATON_VLLM_FORKS", raising=False)  # one starts as those of users do
    (tmp_path / "program.py").write_text(PROGRAM)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {PYTHON} {tmp_path / "program.py"} "$@"\n')
    python.chmod(0o755)
    external = ExternalEngine(kind="vllm", python=str(python), args=ARGS, hand_off=hand_off)
    settings = EngineSettings(
        model=str(MODEL), numerics="fast", max_context_tokens=2048, external=external
    )
    engine = await EngineClient.start(settings)
    assert engine.ready.numerics_id.startswith("vllm/0.99.0/")
    await engine.stop()
    log = capfd.readouterr().err
    assert "vLLM 0.99.0 is not a version that Baton was tested with" in log
    assert "reset prefix cache" in log.partition("is not a version")[2]  # the test has ended
