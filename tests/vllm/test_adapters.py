"""LoRA adapters on a real vLLM (`make test-vllm`), on this machine's CPU."""

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.engine.llm import LLM
from baton.engine.remote.http import HttpOrigin
from baton.model.artifact import resolve_model
from baton.types.params import SamplingParams
from tests.engine.lora_files import write_adapter
from tests.engine.vllm.record import FRANCE
from tests.fleet.test_up import Served, wait_for
from tests.vllm.places import ARGS, MODEL, PYTHON
from tests.vllm.test_fleet import READY_S, Fleet, sockets

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment"),
]
MODELS = ("smol", "adapter-0", "adapter-1", "adapter-2")
CONFIG = f"""
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
  vllm: {{python: {PYTHON}, args: {json.dumps([*ARGS, "--enable-lora", "--max-loras", "2"])}}}
"""


def write_adapters(folder: Path, count: int) -> list[list[int]]:
    """Write adapters ``0``, ``1``...; return the responses of Baton's own engine.

    The first response is that of the model without an adapter.
    """
    config = resolve_model(str(MODEL)).config
    folders = [write_adapter(folder / f"{n}", config, seed=n, size=0.2) for n in range(count)]
    own = LLM(str(MODEL), numerics="fast", kv_blocks=64)
    digests = ["", *(own.load_adapter(folder) for folder in folders)]
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    outputs = own.generate([FRANCE] * len(digests), greedy, adapter=digests)
    return [output.token_ids for output in outputs]


def test_requests_with_three_adapters_and_none_share_a_worker_that_holds_two(
    tmp_path: Path,
) -> None:
    """Adapters are loaded by the API; each response begins as Baton's own engine begins it."""
    folder = tmp_path / "adapters"
    expected = write_adapters(folder, 3)
    served = Served([sys.executable, "-m", "fleet.cli.main", "up"], tmp_path, CONFIG % folder)
    try:
        fleet = Fleet(served.wait_ready(READY_S))
        with fleet.client("operator") as client:
            for number in range(3):
                body = {"lora_name": f"adapter-{number}", "lora_path": f"{number}"}
                loaded = client.post("/v1/load_lora_adapter", json=body)
                assert loaded.status_code == 200, loaded.text
        alone = [ask(fleet, model) for model in MODELS]
        assert len({tokens[0] for tokens in alone}) == 4
        pairs = list(zip(alone, expected, strict=True))
        assert all(tokens[0] == others[0] for tokens, others in pairs), pairs
        assert sum(tokens[:5] == others[:5] for tokens, others in pairs) >= 3, pairs  # near ties
        with ThreadPoolExecutor(12) as threads:
            mixed = list(threads.map(lambda model: ask(fleet, model), MODELS * 3))
        assert mixed == alone * 3  # vLLM for CPUs alone gives `smol` an adapter's tokens here
        wait_for(fleet.is_at_rest, 30)
        assert len(loaded_adapters(fleet)) == 2
    finally:
        served.process.terminate()
        served.process.wait(60)


def ask(fleet: Fleet, model: str) -> list[int]:
    """Return the tokens of a model's greedy response."""
    body = {"model": model, "prompt": FRANCE, "temperature": 0, "max_tokens": 12}
    with fleet.client() as client:
        answer = client.post("/v1/completions", json={**body, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def loaded_adapters(fleet: Fleet) -> list[str]:
    """Return the names of the adapters that vLLM has loaded."""
    (socket,) = sockets(fleet).values()
    page = asyncio.run(HttpOrigin.of_socket(socket).fetch("GET", "/v1/models", 30.0))
    return [one["id"] for one in json.loads(page)["data"] if one["parent"]]
