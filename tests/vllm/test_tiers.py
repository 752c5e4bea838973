"""KV tier of a vLLM worker: its OffloadingConnector, its events, its price (`make test-vllm`).

On CPUs vLLM's own tier refuses to start, so the copies are those of ``host_tier.py``.
"""

import asyncio
from pathlib import Path

import msgspec
import pytest

from baton.engine.process.client import EngineClient
from baton.engine.remote.http import HttpOrigin
from baton.engine.settings import EngineSettings, ExternalEngine, KvTierSettings
from baton.engine.vllm.control import VllmControl
from baton.engine.vllm.server import command
from baton.types.errors import InternalError
from tests.vllm.hand_offs import doubtful, vllm_metric
from tests.vllm.places import ARGS, MODEL, PYTHON
from tests.vllm.test_baton_hand_off import EXTERNAL_HITS, vllm_of
from tests.vllm.test_fleet import READY_S
from tests.workers.harness import MiniRouter, WorkerProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment"),
]
TIERS = KvTierSettings(memory_mb=256)
POOL = ("--num-gpu-blocks-override", "24")  # of 32 tokens


def with_host_tier(folder: Path) -> ExternalEngine:
    """Return an engine whose connector is Baton's, but for the class that copies."""
    python = folder / "python"
    own = Path(__file__).parent
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{own}" exec {PYTHON} "$@"\n')
    python.chmod(0o755)
    external = ExternalEngine(kind="vllm", python=str(python), args=(*ARGS, *POOL))
    line = command(external, EngineSettings(model="", kv_tiers=TIERS), Path(), Path())
    connector = msgspec.json.decode(line[line.index("--kv-transfer-config") + 1])
    extra = connector["kv_connector_extra_config"]
    extra |= {"spec_name": "HostTier", "spec_module_path": "host_tier"}
    more = ("--kv-transfer-config", msgspec.json.encode(connector).decode())
    return msgspec.structs.replace(external, args=(*external.args, *more))


async def test_evicted_blocks_come_back_from_host_memory_and_the_index_knows(
    tmp_path: Path,
) -> None:
    worker = await WorkerProcess.start(
        "decode-0",
        ready_s=READY_S,
        model=str(MODEL),
        numerics="fast",
        max_context_tokens=704,
        kv_tiers=TIERS,
        external=with_host_tier(tmp_path),
    )
    try:
        router = MiniRouter(worker)
        await router.connect()
        own = vllm_of(worker)
        first = list(range(300, 600))  # 9 whole blocks of 23
        cached = []
        for number, prompt in enumerate((first, range(1000, 1600), range(2000, 2600), first)):
            name = f"r{number}"
            await router.submit(name, list(prompt), sampling={"max_tokens": 8})
            ended = await router.ended(name, 60.0)
            assert not ended.HasField("error"), ended
            cached.append(ended.times.cached_tokens)
            await asyncio.sleep(1.0)  # vLLM's KV events follow the response
        assert cached == [0, 0, 0, 288]
        assert await asyncio.to_thread(vllm_metric, own, EXTERNAL_HITS) == 288
        tokens = router.tokens["r3"][0]
        if tokens != router.tokens["r0"][0]:
            assert not await doubtful(own, first, tokens)
        assert router.status is not None
        (tier,) = router.status.kv_tiers
        assert tier.name == "memory"
        assert tier.blocks > tier.held_blocks >= 2 * (9 + 18 + 18)
        assert await VllmControl(HttpOrigin.of_socket(own)).erase_cache()
        await router.submit("erased", first, sampling={"max_tokens": 8})
        assert (await router.ended("erased", 60.0)).times.cached_tokens == 0
        assert await asyncio.to_thread(vllm_metric, own, EXTERNAL_HITS) == 288
        await router.close()
    finally:
        await worker.stop()


async def test_vllms_own_tier_refuses_cpus() -> None:
    external = ExternalEngine(kind="vllm", python=str(PYTHON), args=ARGS)
    settings = EngineSettings(model=str(MODEL), numerics="fast", kv_tiers=TIERS, external=external)
    with pytest.raises(InternalError, match="`vllm serve` exited with code 1"):
        await EngineClient.start(settings)
