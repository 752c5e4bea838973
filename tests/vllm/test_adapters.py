"""LoRA adapters on a real vLLM (`make test-vllm`), on this machine's CPU."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from batonpb import common_pb2

from baton.engine.llm import LLM
from baton.engine.settings import ExternalEngine
from baton.model.artifact import resolve_model
from baton.model.lora_artifact import read_adapter
from baton.types.params import SamplingParams
from tests.engine.lora_files import write_adapter
from tests.engine.vllm.record import FRANCE
from tests.fleet.test_up import Served
from tests.vllm.places import ARGS, MODEL, PYTHON
from tests.vllm.test_fleet import READY_S, Fleet
from tests.workers.harness import MiniRouter, WorkerProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment"),
]
LORA = ("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "2", "--max-lora-rank", "8")
FLEET = f"""
fleet: vllm
model: {MODEL}
served_model_name: smol
numerics: fast
max_context_tokens: 2048
port: 0
api_keys:
  key-of-tenant-a: a
  key-of-tenant-operator: {{tenant: operator, role: operator}}
adapters: {{folder: %s, max_loaded: 2, max_rank: 8}}
pools:
  prefill: 0
  decode: 1
  engine: vllm
  vllm: {{python: {PYTHON}, args: {json.dumps([*ARGS, *LORA[:3]])}}}
"""


async def ask(router: MiniRouter, name: str, lora: common_pb2.Adapter | None = None) -> list[int]:
    seed = lora.digest if lora else b"s" * 16  # as the router does: names differ by adapter
    sampling = {"max_tokens": 12, "temperature": 0.0}
    await router.submit(name, FRANCE, None, lora, sampling=sampling, hash_seed=seed)
    ended = await router.ended(name, 120.0)
    assert not ended.HasField("error"), ended
    return router.tokens[name][0]


def adapters(folder: Path, count: int) -> tuple[list[Path], list[list[int]]]:
    """Write adapters; return their folders, and the responses of Baton's own engine.

    The first response is that of the model without an adapter.
    """
    config = resolve_model(str(MODEL)).config
    folders = [write_adapter(folder / f"{n}", config, seed=n, size=0.2) for n in range(count)]
    own = LLM(str(MODEL), numerics="fast", kv_blocks=64)
    digests = ["", *(own.load_adapter(folder) for folder in folders)]
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    outputs = own.generate([FRANCE] * len(digests), greedy, adapter=digests)
    return folders, [output.token_ids for output in outputs]


async def test_requests_with_three_adapters_and_none_share_a_worker(tmp_path) -> None:
    """Two adapters fit; each response begins as Baton's own engine begins it."""
    config = resolve_model(str(MODEL)).config
    folders, expected = adapters(tmp_path, 3)
    loras: list[common_pb2.Adapter | None] = [None]
    for number, folder in enumerate(folders):
        digest = read_adapter(folder, config, 8).digest
        loras.append(common_pb2.Adapter(name=f"a{number}", digest=digest, path=str(folder)))
    worker = await WorkerProcess.start(
        "decode-0",
        ready_s=READY_S,
        model=str(MODEL),
        numerics="fast",
        max_context_tokens=2048,
        max_adapters=2,
        external=ExternalEngine(
            kind="vllm", python=str(PYTHON), args=(*ARGS, *LORA), adapters=True
        ),
    )
    try:
        router = MiniRouter(worker)
        await router.connect()
        alone = [await ask(router, f"alone {n}", lora) for n, lora in enumerate(loras)]
        assert len({tokens[0] for tokens in alone}) == 4
        pairs = list(zip(alone, expected, strict=True))
        assert all(tokens[0] == others[0] for tokens, others in pairs), pairs
        assert sum(tokens[:5] == others[:5] for tokens, others in pairs) >= 3, pairs  # near ties
        asked = [ask(router, f"mixed {n}", loras[n % 4]) for n in range(12)]
        mixed = await asyncio.gather(*asked)
        assert [tokens[0] for tokens in mixed] == [alone[n % 4][0] for n in range(12)]
        await router.baseline()
        assert len(router.status.adapters) == 2
        await router.close()
    finally:
        await worker.stop()


def test_adapters_that_the_api_of_a_fleet_loads_are_asked_by_name(tmp_path: Path) -> None:
    _, expected = adapters(tmp_path / "adapters", 2)
    config = FLEET % (tmp_path / "adapters")
    served = Served([sys.executable, "-m", "fleet.cli.main", "up"], tmp_path, config)
    try:
        fleet = Fleet(served.wait_ready(READY_S))
        with fleet.client("operator") as client:
            for name in ("0", "1"):
                body = {"lora_name": f"adapter-{name}", "lora_path": name}
                loaded = client.post("/v1/load_lora_adapter", json=body)
                assert loaded.status_code == 200, loaded.text
        found: list[list[int]] = []
        with fleet.client() as client:
            for model in ("smol", "adapter-0", "adapter-1"):
                body = {"model": model, "prompt": FRANCE, "temperature": 0, "max_tokens": 12}
                body["return_token_ids"] = True
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                found.append(answer.json()["choices"][0]["token_ids"])
    finally:
        served.process.terminate()
        served.process.wait(60)
    assert len({tokens[0] for tokens in found}) == 3
    assert [tokens[0] for tokens in found] == [tokens[0] for tokens in expected]  # before near ties
