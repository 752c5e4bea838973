"""Adapters as targets, canaries and shadows of names: loaded first, told apart, and gated."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.types.gates import GoldenPrompt
from router.adapter_table import AdapterTable
from router.served_model import ServedModel
from tests.engine.lora_files import write_adapter
from tests.registry.conftest import redis_server, registry
from tests.router.conftest import MODEL, OPS, Fleet, until
from tests.router.emulated_worker import Script, answer_token

__all__ = ["redis_server", "registry"]

WORKERS = ("prefill-0", "prefill-1", "decode-0")
RIGHT = [answer_token(0, 0, index) for index in range(4)]
GOLDEN = {"name": "greeting", "prompt": "hi", "max_tokens": 4, "tokens": RIGHT}


@pytest.fixture(scope="module")
def paths(artifact, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("lora")
    names = ("red", "blue")
    return {
        name: write_adapter(folder / name, artifact.config, seed=seed, rank=2, layers=(0,))
        for seed, name in enumerate(names)
    }


@pytest.fixture
async def fleet(make_fleet, artifact, model, paths, registry) -> Fleet:
    """A router with the adapters ``red`` and ``blue``, and three workers."""
    served = object.__new__(ServedModel)
    served.__dict__.update(model.__dict__)
    served.adapters = AdapterTable(artifact.config, model.names, folder="/")
    made = await make_fleet(
        {name: Script() for name in WORKERS},
        served,
        registry=registry,
        golden=(msgspec.convert({**GOLDEN, "tokens": [1, 2, 3, 4]}, GoldenPrompt),),  # the model's
    )
    for name, path in paths.items():
        body = {"lora_name": name, "lora_path": str(path)}
        assert (
            await made.http.post("/v1/load_lora_adapter", json=body, headers=OPS)
        ).status_code == 200
    return made


async def change(fleet: Fleet, verb: str, name: str, **more: Any) -> Any:
    return await fleet.http.post(
        "/fleet/models", json={"verb": verb, "name": name, **more}, headers=OPS
    )


def version(fleet: Fleet, name: str) -> str:
    return fleet.lane.model.adapters.find(name).digest[:12]


def loads(fleet: Fleet) -> list[tuple[str, str]]:
    """Adapters and prefill workers of the requests by which the router loads adapters."""
    return [
        (one.adapter.name, one.prefill.worker_id)
        for one in fleet.workers["decode-0"].submissions
        if one.request_id.startswith("warm-")
    ]


async def test_workers_load_an_adapter_before_a_name_leads_to_it(fleet: Fleet) -> None:
    assert (await change(fleet, "canary", MODEL, model="red", share=1.0)).status_code == 200
    pairs = [("red", "prefill-0"), ("red", "prefill-1")]
    assert loads(fleet) == pairs
    answer = await fleet.chat()
    assert answer.json()["model"] == "red"
    header = f"red; version={version(fleet, 'red')}; why=canary 100 %; rollback={MODEL}"
    assert answer.headers["x-baton-model"] == header
    assert (await change(fleet, "promote", MODEL)).status_code == 200
    assert loads(fleet) == pairs * 2  # in case a worker has given it up
    assert (await fleet.chat()).json()["model"] == "red"
    assert (await change(fleet, "rollback", MODEL)).status_code == 200
    answer = await fleet.chat()
    assert answer.json()["model"] == MODEL
    plain = f"{MODEL}; version={fleet.lane.model.version}; why=named"
    assert answer.headers["x-baton-model"] == plain


async def test_an_adapter_that_a_worker_cannot_load_gets_no_request(fleet: Fleet) -> None:
    fleet.workers["decode-0"].script.fail = ("adapter_load_failed", "the file is gone", False)
    for verb, more in (("alias", {}), ("canary", {"share": 0.5}), ("shadow", {"share": 0.5})):
        refused = await change(fleet, verb, "chat" if not more else MODEL, model="red", **more)
        assert refused.status_code == 503
        assert "prefill-0 and decode-0 cannot run red: the file is gone" in refused.text
    assert not fleet.router.routes.table.names


async def test_versions_of_an_adapter_follow_one_another(fleet: Fleet) -> None:
    await change(fleet, "alias", "chat", model="red")
    await change(fleet, "canary", "chat", model="blue", share=0.5)
    answers = [await fleet.chat(f"question {number}", model="chat") for number in range(16)]
    found = {(one.json()["model"], one.headers["x-baton-model"].split(";")[1]) for one in answers}
    assert found == {(name, f" version={version(fleet, name)}") for name in ("red", "blue")}
    listed = (await fleet.http.get("/fleet/models")).json()["models"][0]["adapters"]
    held = [{"name": name, "version": version(fleet, name)} for name in ("blue", "red")]
    assert [{**one, "held_by_workers": 0} for one in held] == listed  # emulated workers tell none


async def test_an_adapter_is_not_unloaded_while_a_name_leads_to_it(fleet: Fleet) -> None:
    await change(fleet, "canary", MODEL, model="red", share=0.5)
    body = {"lora_name": "red"}
    refused = await fleet.http.post("/v1/unload_lora_adapter", json=body, headers=OPS)
    assert refused.status_code == 400
    assert f"{MODEL} leads to red: use `baton models alias`, `rollback`" in refused.text
    await change(fleet, "rollback", MODEL)
    assert (
        await fleet.http.post("/v1/unload_lora_adapter", json=body, headers=OPS)
    ).status_code == 200


async def test_golden_prompts_of_an_adapter_are_its_own(fleet: Fleet) -> None:
    assert not (await change(fleet, "gate", MODEL)).json()["golden"]["passed"]
    assert (await change(fleet, "gate", "red")).json()["golden"] is None
    wrong = [{**GOLDEN, "tokens": [1, 2, 3, 4]}]
    await change(fleet, "gate", "red", golden=wrong)
    refused = await change(fleet, "canary", MODEL, model="red", share=0.5)
    assert "red gets no requests: 1 golden prompts failed" in refused.text
    await change(fleet, "gate", "red", golden=[GOLDEN])
    assert (await change(fleet, "canary", MODEL, model="red", share=1.0)).status_code == 200
    for worker in fleet.workers.values():
        worker.script.answer = [9, 9, 9, 9]
    table = fleet.router.routes
    await until(lambda: table.table.names[MODEL].thrown_out == "red", 10.0)
    page = (await fleet.http.get("/metrics")).text
    labels = f'model="red",result="wrong",version="{version(fleet, "red")}"'
    assert f"baton_golden_prompts_total{{{labels}}}" in page


async def test_a_private_adapter_answers_no_name(fleet: Fleet, paths, artifact) -> None:
    adapters = fleet.lane.model.adapters
    entry = await asyncio.to_thread(adapters._read, "t/own", str(paths["red"]))
    adapters._loaded = {"t/own": msgspec.structs.replace(entry, owner="t")}
    refused = await change(fleet, "alias", "chat", model="t/own")
    assert refused.status_code == 400
    assert "t/own is an adapter of the tenant t" in refused.text
