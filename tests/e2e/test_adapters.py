"""LoRA over HTTP in both modes: chosen by model name, loaded and unloaded while the fleet runs."""

import asyncio
from pathlib import Path

import httpx
import pytest

from baton.engine.llm import LLM
from baton.model.artifact import resolve_model
from tests.e2e.fleet_processes import MODEL, NAME, OPS, fleet, soon
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
async def test_loads_under_streams_change_no_running_answer(shared, paths, tmp_path):
    """As in vLLM #47724, where a load moved running requests to another adapter."""
    loaded(shared.url, "red", paths["red"])
    config = resolve_model(MODEL).config
    names = [f"new-{number}" for number in range(3)]
    made = {
        name: write_adapter(tmp_path / name, config, seed=9 + number, size=0.1)
        for number, name in enumerate(names)
    }
    long = {"max_tokens": 48}
    try:
        asked = [(model, mode) for model in (NAME, "red") for mode in MODES]
        alone = [await text(shared.url, model, mode, **long) for model, mode in asked]
        assert len(set(alone)) == 2
        running = [
            asyncio.create_task(text(shared.url, model, mode, **long)) for model, mode in asked
        ]
        answers = []
        for name, path in made.items():
            await asyncio.to_thread(loaded, shared.url, name, path)
            answers.append(await text(shared.url, name, "colocated", max_tokens=1))
        assert not all(task.done() for task in running), "loaded while they ran"
        assert await asyncio.gather(*running) == alone
    finally:
        for name in ("red", *names):
            httpx.post(
                f"{shared.url}/v1/unload_lora_adapter", json={"lora_name": name}, headers=OPS
            )


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


@pytest.mark.slow
async def test_a_second_router_hears_of_it(shared, paths):
    second = await asyncio.to_thread(shared.start_router)
    loaded(shared.url, "red", paths["red"])

    def known() -> bool:
        return httpx.get(f"{second}/v1/models/red").status_code == 200

    await soon(known, 5)
    assert (
        httpx.post(
            f"{second}/v1/unload_lora_adapter", json={"lora_name": "red"}, headers=OPS
        ).status_code
        == 200
    )
    await soon(lambda: httpx.get(f"{shared.url}/v1/models/red").status_code == 404, 5)
    process, _ = shared.routers.pop()
    process.terminate()
    process.wait(10)


@pytest.mark.slow
async def test_a_new_life_of_a_worker_loads_the_adapter_again(tmp_path, paths):
    with fleet(tmp_path, "decode-0") as running:
        loaded(running.url, "red", paths["red"])
        want = await text(running.url, "red", "colocated")
        running.workers["decode-0"].kill()
        await soon(lambda: running.workers_shown()["decode-0"]["state"] == "dead")
        running.workers.pop("decode-0").process.stdout.close()
        await asyncio.to_thread(running.start_workers, "decode-0", epoch=2)
        await soon(lambda: running.workers_shown()["decode-0"]["state"] == "ready", 20)
        assert await text(running.url, "red", "colocated") == want
        page = httpx.get(f"http://{running.workers['decode-0'].record.metrics_address}/metrics")
        assert 'baton_adapter_loads_total{adapter="red",outcome="loaded"} 1.0' in page.text
