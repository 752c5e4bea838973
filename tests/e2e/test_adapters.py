"""LoRA over HTTP in both modes: chosen by model name, loaded and unloaded while the fleet runs."""

import asyncio
from pathlib import Path

import httpx
import pytest

from baton.engine.llm import LLM
from baton.model.artifact import resolve_model
from tests.e2e.fleet_processes import MODEL, NAME, OPS
from tests.engine.lora_files import write_adapter

MODES = ("disaggregated", "colocated")
PROMPT = "Once upon a time there was a small lighthouse on a rock in the sea, and in it lived"
FIELDS = {"max_tokens": 8, "temperature": 0.7, "seed": 11, "ignore_eos": True}


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    folder, config = tmp_path_factory.mktemp("lora"), resolve_model(MODEL).config
    return {
        "red": write_adapter(folder / "red", config, seed=1, size=0.1),
        "blue": write_adapter(
            folder / "blue", config, seed=2, size=0.1, rank=16, targets=("q_proj", "v_proj")
        ),
    }


def loaded(url: str, name: str, path: Path) -> None:
    body = {"lora_name": name, "lora_path": str(path)}
    answer = httpx.post(f"{url}/v1/load_lora_adapter", json=body, headers=OPS, timeout=30)
    assert answer.status_code == 200, answer.text


async def complete(url: str, model: str, mode: str, prompt: str = PROMPT, **fields):
    async with httpx.AsyncClient(base_url=url, timeout=90) as client:
        return await client.post(
            "/v1/completions",
            json={"model": model, "prompt": prompt, **FIELDS, **fields},
            headers={"x-baton-mode": mode},
        )


async def text(url: str, model: str, mode: str, **fields) -> str:
    answer = await complete(url, model, mode, **fields)
    assert answer.status_code == 200, answer.text
    assert f"mode={mode}" in answer.headers["x-baton-route"]
    return answer.json()["choices"][0]["text"]


@pytest.mark.slow
async def test_adapters_are_loaded_mixed_and_unloaded_while_the_fleet_runs(shared, paths):
    for name, path in paths.items():
        loaded(shared.url, name, path)
    models = [NAME, *paths]
    # all at once: base and both adapters in one batch, over both paths, cold
    asked = [(model, mode) for model in models for mode in MODES]
    texts = await asyncio.gather(*(text(shared.url, model, mode) for model, mode in asked))
    answers = dict(zip(asked, texts, strict=True))
    for model in models:
        assert answers[model, "disaggregated"] == answers[model, "colocated"]
        assert await text(shared.url, model, "disaggregated") == answers[model, "colocated"], "hit"
    assert len({answers[model, "colocated"] for model in models}) == 3

    assert (await asyncio.to_thread(httpx.get, f"{shared.url}/v1/models/red")).json()["rank"] == 8
    await asyncio.to_thread(shared.assert_baseline)
    for name in paths:
        gone = httpx.post(
            f"{shared.url}/v1/unload_lora_adapter", json={"lora_name": name}, headers=OPS
        )
        assert gone.status_code == 200
        answer = await complete(shared.url, name, "colocated")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert await text(shared.url, NAME, "colocated") == answers[NAME, "colocated"]


@pytest.mark.slow
async def test_the_fleet_answers_as_the_engine_alone(shared, paths):
    loaded(shared.url, "red", paths["red"])
    try:
        llm = LLM(MODEL, kv_blocks=64, threads=1)
        digest = llm.load_adapter(paths["red"])
        want = llm.generate([PROMPT], adapter=digest, **FIELDS)[0].text
        for mode in MODES:
            assert await text(shared.url, "red", mode) == want
    finally:
        httpx.post(f"{shared.url}/v1/unload_lora_adapter", json={"lora_name": "red"}, headers=OPS)
