"""Adapters by model name: loaded and unloaded at run time, validated first, shared by routers."""

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from batonpb.common_pb2 import Capabilities

from baton.config.clients import ApiKeyConfig
from baton.registry.redis_store import Registry
from baton.registry.shared_adapters import AdapterEntry, LoadedAdapters, SharedAdapters
from baton.tenants.audit.inbox import AuditInbox
from baton.tenants.audit.log import AuditLog
from baton.types.errors import AdapterExistsError, InvalidRequestError, UnavailableError
from router.adapter_table import AdapterTable
from router.routing.placement.prompt_hashes import HashSeedCache
from router.served_model import ServedModel
from tests.engine.lora_files import write_adapter
from tests.registry.conftest import redis_server, registry
from tests.router.conftest import MODEL, events_of, until
from tests.router.conftest import OPS as FLEET
from tests.telemetry.values import value_of

__all__ = ["redis_server", "registry"]

GONE = Registry("redis://127.0.0.1:1", "test")


@pytest.fixture
def served(artifact, model):
    """The session's model with an empty table of its own."""
    made = object.__new__(ServedModel)
    made.__dict__.update(model.__dict__)
    made.adapters = AdapterTable(artifact.config, model.names, folder="/")
    return made


@pytest.fixture(scope="module")
def path(artifact, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "pirate"
    return write_adapter(folder, artifact.config, rank=4, layers=(0, 29), dtype=torch.bfloat16)


async def load(fleet, name: str, path: object, headers: dict = FLEET):
    body = {"lora_name": name, "lora_path": str(path)}
    return await fleet.http.post("/v1/load_lora_adapter", json=body, headers=headers)


async def unload(fleet, name: str, headers: dict = FLEET):
    body = {"lora_name": name}
    return await fleet.http.post("/v1/unload_lora_adapter", json=body, headers=headers)


async def test_loads_and_unloads_are_in_the_audit_log(make_fleet, served, path, tmp_path):
    registry = Registry("redis://127.0.0.1:1", "test")
    audit = AuditLog(AuditInbox(registry), tmp_path / "audit.jsonl")
    fleet = await make_fleet({"decode-0": None}, served, registry=registry, audit=audit)
    await load(fleet, "pirate", path)
    await load(fleet, "missing", "/no/such/folder")
    await unload(fleet, "pirate")
    lines = (tmp_path / "audit.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [(one["verb"], one["what"], one["who"]) for one in found] == [
        ("adapters load", "pirate", "fleet token"),
        ("adapters unload", "pirate", "fleet token"),
    ]
    assert found[0]["after"]["path"] == str(path) and found[0]["after"]["digest"]


async def test_a_loaded_adapter_is_a_model_until_it_is_unloaded(make_fleet, served, path):
    fleet = await make_fleet({"decode-0": None}, served)
    assert (await fleet.chat(model="pirate")).status_code == 404
    answer = await load(fleet, "pirate", path)
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'pirate' added successfully.",
    )
    told = await fleet.chat(model="pirate")
    assert told.status_code == 200
    assert told.json()["model"] == "pirate"
    assert events_of((await fleet.chat(model="pirate", stream=True)).text)[-1] == "[DONE]"
    plain, *_ = [await fleet.chat(), await fleet.complete(model="pirate")]
    assert plain.status_code == 200
    with_it = fleet.workers["decode-0"].submissions
    assert [s.adapter.name for s in with_it] == ["pirate", "pirate", "", "pirate"]
    assert with_it[0].adapter.path == str(path)
    assert with_it[0].adapter.digest == bytes.fromhex(served.adapters.find("pirate").digest)
    assert with_it[0].hash_seed == with_it[1].hash_seed != with_it[2].hash_seed
    assert not with_it[2].HasField("adapter")
    explained = await fleet.http.get(f"/fleet/requests/{told.json()['id']}")
    assert explained.json()["adapter"] == "pirate"

    assert (await unload(fleet, "pirate")).status_code == 200
    gone = await fleet.chat(model="pirate")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    assert (await unload(fleet, "pirate")).status_code == 404
    assert (await load(fleet, "pirate", path)).status_code == 200, "it may come back"


async def test_models_lists_the_adapter_with_its_parent(make_fleet, served, path):
    fleet = await make_fleet({"decode-0": None}, served)
    await load(fleet, "org/pirate", path)
    listed = (await fleet.http.get("/v1/models")).json()["data"]
    assert [item["id"] for item in listed] == [*served.names, "org/pirate"]
    record = (await fleet.http.get("/v1/models/org/pirate")).json()
    assert (record["parent"], record["root"], record["rank"]) == (MODEL, str(path), 4)
    assert record["adapter_digest"] == served.adapters.find("org/pirate").digest
    page = (await fleet.http.get("/metrics")).text
    assert "baton_adapters_served 1.0" in page


async def test_requests_are_counted_by_adapter(make_fleet, served, path):
    fleet = await make_fleet({"decode-0": None}, served)
    await load(fleet, "pirate", path)
    for _ in range(2):
        await fleet.chat(model="pirate", max_tokens=3)
    await fleet.chat()
    value = partial(value_of, fleet.router.metrics)
    await asyncio.sleep(0.05)
    assert value("baton_adapter_requests", adapter="pirate") == 2
    assert value("baton_adapter_generation_tokens", adapter="pirate") == 6
    assert value("baton_adapter_prompt_tokens", adapter="pirate") > 10


async def test_a_request_in_flight_outlives_its_adapter(make_fleet, served, path):
    fleet = await make_fleet({"decode-0": None}, served)
    await load(fleet, "pirate", path)
    running = asyncio.create_task(fleet.chat(model="pirate", max_tokens=40))
    while not fleet.workers["decode-0"].submissions:
        await asyncio.sleep(0.01)
    assert (await unload(fleet, "pirate")).status_code == 200
    answer = await running
    assert answer.json()["usage"]["completion_tokens"] == 40


async def test_what_cannot_be_loaded_is_refused_and_named(make_fleet, served, path, tmp_path):
    fleet = await make_fleet({"decode-0": None}, served)
    smaller = replace(
        served.artifact.config, num_heads=4, head_dim=16, hidden_size=64, num_layers=1
    )
    wrong = write_adapter(tmp_path / "wrong", smaller)
    large = write_adapter(tmp_path / "large", served.artifact.config, rank=65, layers=(0,))
    cases = [
        ("a", tmp_path / "nowhere", 400, "not a directory"),
        ("a", "~no-such-user/lora", 400, "not a directory"),
        ("a", "with\0a null byte", 400, "cannot be read"),
        ("a", "x" * 5000, 400, "cannot be read"),
        ("a", wrong, 400, "is [8, 64], not [8, 576]"),
        ("a", large, 400, "rank 65 is above adapters.max_rank = 64"),
        ("x" * 201, path, 400, "must be 1 to 200 printable characters"),
        ("a\nb", path, 400, "must be 1 to 200 printable characters"),
        (MODEL, path, 409, "is a name of the base model"),
    ]
    for name, where, status, said in cases:
        answer = await load(fleet, name, where)
        assert answer.status_code == status, answer.text
        assert said in answer.json()["error"]["message"]
    assert (await load(fleet, "a", path)).status_code == 200
    twice = await load(fleet, "a", path)
    assert (twice.status_code, twice.json()["error"]["code"]) == (409, "adapter_exists")
    for body in ({"lora_name": "b"}, {"lora_name": "", "lora_path": "x"}, {"lora_path": 3}):
        answer = await fleet.http.post("/v1/load_lora_adapter", json=body, headers=FLEET)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] in {"lora_name", "lora_path"}


async def test_where_there_are_keys_a_key_is_needed(make_fleet, served, path):
    fleet = await make_fleet(
        {"decode-0": None},
        served,
        api_keys={"secret-key": ApiKeyConfig(tenant="team", role="operator")},
    )
    assert (await load(fleet, "pirate", path, {})).status_code == 401
    assert (await unload(fleet, "pirate", {})).status_code == 401
    with_key = {"authorization": "Bearer secret-key"}
    assert (await load(fleet, "pirate", path, with_key)).status_code == 200


OWN = {
    "key-of-one": ApiKeyConfig(tenant="one", adapters="own"),
    "plain-key-of-one": ApiKeyConfig(tenant="one"),
    "key-of-two": ApiKeyConfig(tenant="two", adapters="own"),
    "key-of-ops": ApiKeyConfig(tenant="ops", role="operator"),
}
ONE, PLAIN_ONE, TWO, OPS = ({"authorization": f"Bearer {key}"} for key in OWN)


@pytest.fixture
def folders(artifact, served, tmp_path) -> Path:
    """An adapter folder with one adapter of each tenant and one of nobody."""
    folder = tmp_path / "adapters"
    for name in ("one/pirate", "two/poet", "common"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_adapter(folder / name, artifact.config, rank=4, layers=(0,))
    served.adapters = AdapterTable(artifact.config, served.names, folder=str(folder))
    return folder


async def test_a_tenants_own_adapters_are_for_its_keys_alone(make_fleet, served, folders):
    fleet = await make_fleet({"decode-0": None}, served, api_keys=OWN)

    async def status(name: str, headers: dict) -> int:
        return (await fleet.chat(model=name, headers=headers)).status_code

    async def listed(headers: dict) -> list[str]:
        models = (await fleet.http.get("/v1/models", headers=headers)).json()["data"]
        return [model["id"] for model in models if model["id"] not in served.names]

    assert (await load(fleet, "one/pirate", "pirate", ONE)).status_code == 200
    assert (await load(fleet, "common", folders / "common", OPS)).status_code == 200
    own = ["common", "one/pirate"]
    assert [await listed(who) for who in (ONE, PLAIN_ONE, TWO, OPS)] == [own, own, ["common"], own]
    for who, seen in ((ONE, 200), (PLAIN_ONE, 200), (TWO, 404), (OPS, 200)):
        record = await fleet.http.get("/v1/models/one/pirate", headers=who)
        assert record.status_code == seen
    for who, served_there in ((ONE, 200), (PLAIN_ONE, 200), (TWO, 404)):
        assert await status("one/pirate", who) == served_there
        assert await status("common", who) == 200
        body = {"model": "one/pirate", "prompt": "Hello"}
        tokens = await fleet.http.post("/tokenize", json=body, headers=who)
        assert tokens.status_code == served_there

    async def unload_as(name: str, headers: dict) -> int:
        body = {"lora_name": name}
        answer = await fleet.http.post("/v1/unload_lora_adapter", json=body, headers=headers)
        return answer.status_code

    assert await unload_as("one/pirate", PLAIN_ONE) == 403
    assert await unload_as("one/pirate", TWO) == 404
    assert await unload_as("common", ONE) == 403
    assert await unload_as("one/pirate", ONE) == 200
    assert await status("one/pirate", ONE) == 404
    assert (await load(fleet, "two/poet", "poet", TWO)).status_code == 200
    assert await unload_as("two/poet", OPS) == 200


async def test_adapters_are_loaded_from_below_their_folder_alone(
    make_fleet, served, folders, path, monkeypatch
):
    fleet = await make_fleet({"decode-0": None}, served, api_keys=OWN)
    (folders / "one" / "out").symlink_to(path)
    (folders / "one" / "circle").symlink_to("circle")
    cases = [
        (ONE, "one/a", "/etc", 400, "is not below"),
        (ONE, "one/a", path, 400, "is not below"),
        (ONE, "one/a", "../two/poet", 400, "is not below"),
        (ONE, "one/a", folders / "common", 400, "is not below"),
        (ONE, "one/a", "out", 400, "is not below"),
        (ONE, "one/a", "circle", 400, "circle"),
        (ONE, "two/a", "pirate", 400, "must begin with 'one/'"),
        (ONE, "a", "pirate", 400, "must begin with 'one/'"),
        (PLAIN_ONE, "one/a", "pirate", 403, "adapters: own"),
        (OPS, "a", path, 400, "is not below"),
        (OPS, "a", "../../etc", 400, "is not below"),
    ]
    for who, name, where, status, said in cases:
        answer = await load(fleet, name, where, who)
        assert (answer.status_code, said in answer.text) == (status, True), answer.text
    monkeypatch.setattr("router.adapter_table.MAX_NAMES_OF_A_TENANT", 1)
    assert (await load(fleet, "one/a", "pirate", ONE)).status_code == 200
    assert "the limit; unload one" in (await load(fleet, "one/b", "pirate", ONE)).text
    served.adapters = AdapterTable(served.artifact.config, served.names)
    assert "adapters: {folder: FOLDER}" in (await load(fleet, "a", path, OPS)).text


async def test_an_owner_is_known_to_every_router_and_after_a_restart(
    artifact, folders, tmp_path, registry
):
    one = AdapterTable(artifact.config, folder=str(folders))
    await one.start(SharedAdapters(registry), tmp_path / "adapters.json")
    await one.load("one/pirate", "pirate", "one")
    again = AdapterTable(artifact.config, folder=str(folders))
    await again.start(SharedAdapters(GONE), tmp_path / "adapters.json")
    assert again.find("one/pirate", "one") == one.find("one/pirate") is not None
    assert again.find("one/pirate", "two") is None and again.served("two") == []
    await one.close()
    await again.close()


def test_names_of_blocks_differ_by_adapter(artifact, served):
    cache = HashSeedCache()
    link = Capabilities(weights_digest=b"w" * 16, numerics_id="exact/x")
    seeds = {
        cache.seed(
            SimpleNamespace(past_baton=False, adapter_digest=digest, cache_scope="team\0"), link
        )
        for digest in ("", "01" * 16, "02" * 16)
    }
    assert len(seeds) == 3


async def test_adapters_of_the_fleet_file_are_there_at_once_and_stay(artifact, path, tmp_path):
    table = AdapterTable(artifact.config, ("base",), {"pirate": str(path)}, folder="/")
    assert [entry.name for entry in table.served()] == ["pirate"]
    with pytest.raises(InvalidRequestError, match="is in the fleet file"):
        await table.unload("pirate")
    with pytest.raises(AdapterExistsError, match="unload it first"):
        await table.load("pirate", str(path))
    with pytest.raises(ValueError, match="not a directory"):
        AdapterTable(artifact.config, ("base",), {"pirate": str(tmp_path / "nowhere")})
    off = AdapterTable(artifact.config, ("base",), max_loaded=0, folder="/")
    with pytest.raises(InvalidRequestError, match="max_loaded is 0"):
        await off.load("pirate", str(path))


async def test_routers_share_the_table_and_heal_an_emptied_redis(
    artifact, path, tmp_path, registry
):
    file = tmp_path / "adapters.json"
    one, two = (AdapterTable(artifact.config, folder="/") for _ in range(2))
    await one.start(SharedAdapters(registry), file)
    await two.start(SharedAdapters(registry))
    await one.load("pirate", str(path))
    await until(lambda: two.served() == one.served() != [])
    await registry.send(("FLUSHALL",))
    for _ in range(100):
        table, _ = await SharedAdapters(registry).read(LoadedAdapters())
        if table is not None and list(table.entries) == ["pirate"]:
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("Redis did not get the table again")
    await two.unload("pirate")
    await until(lambda: one.served() == [])
    await one.load("pirate", str(path))
    await until(lambda: [entry.name for entry in two.served()] == ["pirate"])
    await one.close()
    await two.close()
    for reserved, served in (((), one.served()), (("pirate",), [])):
        again = AdapterTable(artifact.config, reserved)
        await again.start(SharedAdapters(GONE), file)
        assert again.served() == served, "a restart while Redis is away"
        await again.close()


async def test_without_redis_no_adapter_changes(artifact, path):
    table = AdapterTable(artifact.config, folder="/")
    await table.start(SharedAdapters(GONE))
    with pytest.raises(UnavailableError, match="shared through Redis"):
        await table.load("pirate", str(path))
    assert table.served() == []
    await table.close()


@pytest.mark.parametrize("where", ["redis", "disk"])
async def test_adapters_of_an_earlier_version_stay_loaded(artifact, tmp_path, registry, where):
    entries = {
        "kept": {"name": "kept", "digest": "ab", "path": "/kept", "changed_ms": 7},
        "gone": {"name": "gone", "changed_ms": 9, "gone": True},
    }
    file = tmp_path / "adapters.json"
    if where == "disk":
        file.write_text(json.dumps(list(entries.values())))
    else:
        fields = [part for name, entry in entries.items() for part in (name, json.dumps(entry))]
        await registry.send(("HSET", registry.key("adapters"), "damaged", "{", *fields))
    table = AdapterTable(artifact.config)
    await table.start(SharedAdapters(registry), file)
    kept = AdapterEntry(name="kept", digest="ab", path="/kept", changed_ms=7)
    assert table.served() == [kept]
    version: bytes | None = None
    for _ in range(100):
        (version,) = await registry.send(("HGET", registry.key("adapters:table"), "version"))
        if version:
            break
        await asyncio.sleep(0.05)
    assert version == b"9"
    reader = AdapterTable(artifact.config)
    await registry.send(("DEL", registry.key("adapters")))
    await reader.start(SharedAdapters(registry))
    assert reader.served() == [kept]
    await table.close()
    await reader.close()


async def test_the_exchange_goes_on_after_a_fault(artifact, monkeypatch):
    """Defect 3: the task ended unheard, and this router saw no change any more."""

    class Stumbling:
        looks = 0

        async def read(self, known):
            self.looks += 1
            if self.looks == 1:
                raise ValueError("by design")
            return known, 0

    monkeypatch.setattr("router.synced_table.POLL_S", 0.01)
    shared, table, failures = Stumbling(), AdapterTable(artifact.config), []
    await table.start(shared, None, failures.append)
    await until(lambda: shared.looks > 2)
    await table.close()
    assert failures == ["adapters"]


async def test_names_that_come_and_go_leave_nothing(artifact, folders, registry):
    """A tenant's key made every router read a table that grew with each name it made up."""
    table = AdapterTable(artifact.config, folder=str(folders))
    await table.start(SharedAdapters(registry))
    for number in range(5):
        await table.load(f"one/{number}", "pirate", "one")
        await table.unload(f"one/{number}", "one")
    shared, _ = await SharedAdapters(registry).read(LoadedAdapters())
    assert shared is not None and shared.version and shared.entries == {}
    await table.close()
