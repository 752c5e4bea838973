"""LoRA adapters on a real vLLM (`make test-vllm`), on this machine's CPU."""

import asyncio

import pytest
from batonpb import common_pb2

from baton.engine.llm import LLM
from baton.engine.settings import ExternalEngine
from baton.model.artifact import resolve_model
from baton.model.lora_artifact import read_adapter
from baton.types.params import SamplingParams
from tests.engine.lora_files import write_adapter
from tests.engine.vllm.record import FRANCE
from tests.vllm.places import ARGS, MODEL, PYTHON
from tests.vllm.test_fleet import READY_S
from tests.workers.harness import MiniRouter, WorkerProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment"),
]
LORA = ("--enable-lora", "--max-loras", "2", "--max-cpu-loras", "2", "--max-lora-rank", "8")


async def ask(router: MiniRouter, name: str, lora: common_pb2.Adapter | None = None) -> list[int]:
    seed = lora.digest if lora else b"s" * 16  # as the router does: names differ by adapter
    sampling = {"max_tokens": 12, "temperature": 0.0}
    await router.submit(name, FRANCE, None, lora, sampling=sampling, hash_seed=seed)
    ended = await router.ended(name, 120.0)
    assert not ended.HasField("error"), ended
    return router.tokens[name][0]


async def test_requests_with_three_adapters_and_none_share_a_worker(tmp_path) -> None:
    """Two adapters fit; each response begins as Baton's own engine begins it."""
    config = resolve_model(str(MODEL)).config
    folders = [write_adapter(tmp_path / f"{n}", config, seed=n, size=0.2) for n in range(3)]
    own = LLM(str(MODEL), numerics="fast", kv_blocks=64)
    digests = [own.load_adapter(folder) for folder in folders]
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    expected = [
        output.token_ids for output in own.generate([FRANCE] * 4, greedy, adapter=["", *digests])
    ]
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
