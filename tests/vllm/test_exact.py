"""Self-test for `numerics: exact` with a real vLLM on this machine's CPU.

vLLM 0.32 has its batch-invariant mode for GPUs only. ``test_hand_off.py`` has the self-test of a
vLLM without the mode.
"""

import msgspec
import pytest

from baton.engine.process.client import EngineClient
from baton.engine.settings import EngineSettings, ExternalEngine
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
