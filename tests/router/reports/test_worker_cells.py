"""Rows of workers for the live page: what `GET /fleet` has, and since when."""

import asyncio
import time

import msgspec

from tests.router.conftest import until
from tests.router.emulated_worker import Script


async def cells_of(fleet) -> dict[str, dict]:
    answer = (await fleet.http.get("/fleet/cells")).json()
    return {row[0]: dict(zip(answer["columns"], row, strict=True)) for row in answer["workers"]}


async def test_rows_agree_with_the_fleet_and_keep_the_time_of_the_last_change(make_fleet):
    began_s = time.time()
    fleet = await make_fleet({"prefill-0": None, "decode-0": Script(streams=3)})
    cells = await cells_of(fleet)
    workers = {one["id"]: one for one in (await fleet.http.get("/fleet")).json()["workers"]}
    assert set(cells) == set(workers) == {"prefill-0", "decode-0"}
    for name, cell in cells.items():
        worker = workers[name]
        for field in ("role", "state", "running", "waiting"):
            assert cell[field] == worker[field]
        blocks = worker["kv_blocks"]
        assert cell["kv_total"] == blocks["total"] > 0
        assert cell["kv_leased"] == blocks["leased"]
        assert began_s <= cell["since_s"] <= time.time()
    assert cells["decode-0"]["running"] == 3
    assert cells["prefill-0"]["prefill_tokens_per_s"] == 3000
    assert cells["prefill-0"]["note"] == ""
    since_s = cells["decode-0"]["since_s"]
    # It dies between two calls of the page: the router notes its states each second.
    await fleet.workers["decode-0"].stop()
    record = fleet.lane.gateway.workers.get("decode-0").record
    gone = {"state": "dead", "reason": "killed by SIGKILL (9)"}
    fleet.directory.put(msgspec.structs.replace(record, **gone))
    await until(lambda: fleet.state("decode-0") == "dead")
    died_s = time.time()
    await asyncio.sleep(2.5)
    cell = (await cells_of(fleet))["decode-0"]
    assert (cell["state"], cell["note"]) == ("dead", "killed by SIGKILL (9)")
    assert since_s < cell["since_s"] <= died_s + 1.5
    assert (await cells_of(fleet))["prefill-0"]["since_s"] == cells["prefill-0"]["since_s"]


async def test_each_worker_has_the_version_that_it_runs(make_fleet):
    fleet = await make_fleet({"decode-0": None, "decode-1": None})
    for number, name in enumerate(("decode-0", "decode-1")):
        record = fleet.lane.gateway.workers.get(name).record
        fleet.directory.put(msgspec.structs.replace(record, version=f"0.{number}.0+abc"))
    await until(lambda: fleet.lane.gateway.workers.get("decode-1").record.version)
    cells = await cells_of(fleet)
    assert [cells[name]["version"] for name in sorted(cells)] == ["0.0.0+abc", "0.1.0+abc"]
    workers = (await fleet.http.get("/fleet")).json()["workers"]
    assert {one["version"] for one in workers} == {"0.0.0+abc", "0.1.0+abc"}
    assert "+" not in (await fleet.http.get("/version")).json()["version"]


async def test_answers_are_counted_by_the_second(make_fleet):
    fleet = await make_fleet({})
    assert (await fleet.chat()).status_code == 503
    await until(lambda: any(one.errors for one in fleet.router.observer.series.after(0)))
    url = "/fleet/series?after=0&workers=false"
    series = (await fleet.http.get(url)).json()
    assert sum(sample["errors"] for sample in series["samples"]) == 1
    assert series["workers"] == {}
