"""Self-test for `numerics: exact` with real vLLMs on this machine's CPU.

vLLM 0.32 has its batch-invariant mode for GPUs only.
"""

import tempfile
from pathlib import Path

import msgspec
import pytest

from baton.engine.process.client import EngineClient
from baton.engine.settings import EngineSettings, ExternalEngine
from baton.engine.vllm import server
from baton.engine.vllm.selftest import prove_exact
from baton.types.errors import InternalError
from tests.vllm.places import ARGS, MODEL, PYTHON

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment"),
]
VOCABULARY = 49152
EXTERNAL = ExternalEngine(kind="vllm", python=str(PYTHON), args=ARGS)
SETTINGS = EngineSettings(model=str(MODEL), max_context_tokens=2048, external=EXTERNAL)


async def test_on_cpus_vllm_fails_in_its_batch_invariant_mode() -> None:
    external = msgspec.structs.replace(EXTERNAL, batch_invariant=True)
    with pytest.raises(InternalError, match="exact: vLLM fails in its batch-invariant mode"):
        await EngineClient.start(msgspec.structs.replace(SETTINGS, external=external))


async def test_without_the_mode_the_bits_depend_on_the_batch() -> None:
    with tempfile.TemporaryDirectory() as folder:
        vllm = await server.start(
            server.command(EXTERNAL, SETTINGS, MODEL, Path(folder)), 1, EXTERNAL
        )
        try:
            await server.until_healthy(vllm, f"{folder}/http", lambda line: None)
            facts = await server.read_facts(folder)
            with pytest.raises(InternalError, match="mode is off"):
                await prove_exact(server.origin_in(folder), facts, VOCABULARY)
            pretended = msgspec.structs.replace(facts, batch_invariant=True)
            with pytest.raises(InternalError, match="in a batch differ from those of"):
                await prove_exact(server.origin_in(folder), pretended, VOCABULARY)
        finally:
            vllm.terminate()
            await vllm.wait()
