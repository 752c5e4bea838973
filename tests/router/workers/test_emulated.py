"""An emulated fleet says so wherever it is looked at; a worker of the other kind is not used."""

import pytest

from tests.router.conftest import MODEL
from tests.router.emulated_worker import Script

EMULATED = "emulated/epyc-135m"


async def test_an_emulated_fleet_is_labelled_everywhere(make_fleet) -> None:
    script = Script(numerics_id=EMULATED)
    fleet = await make_fleet({"decode-0": script}, emulated="epyc-135m")
    answers = [await fleet.chat(), await fleet.chat(stream=True)]
    for answer in answers:
        assert answer.status_code == 200
        assert answer.headers["x-baton-emulated"] == "epyc-135m"
        assert '"system_fingerprint":"baton-emulated-epyc-135m"' in answer.text
    shown = (await fleet.http.get("/fleet")).json()
    assert shown["emulated"] == "epyc-135m"
    assert shown["workers"][0]["engine"] == "emulated: epyc-135m"
    assert shown["workers"][0]["refused"] == ""
    models = (await fleet.http.get("/v1/models")).json()["data"]
    assert {model["emulated"] for model in models} == {"epyc-135m"}
    assert (await fleet.http.get(f"/v1/models/{MODEL}")).json()["emulated"] == "epyc-135m"
    page = (await fleet.http.get("/metrics")).text
    assert 'baton_engine_info{engine="emulated",timing="epyc-135m"} 1.0' in page


async def test_a_real_fleet_bears_no_such_label(make_fleet) -> None:
    fleet = await make_fleet({"decode-0": None})
    answer = await fleet.chat()
    assert "x-baton-emulated" not in answer.headers
    assert "emulated" not in answer.json()["system_fingerprint"]
    shown = (await fleet.http.get("/fleet")).json()
    assert (shown["emulated"], shown["workers"][0]["engine"]) == (None, "real")
    assert (await fleet.http.get("/v1/models")).json()["data"][0]["emulated"] is None
    assert 'engine="real"' in (await fleet.http.get("/metrics")).text


@pytest.mark.parametrize(
    ("fleets", "alien", "said"),
    [
        ("", EMULATED, "its engine is emulated (epyc-135m), the engines of this fleet are real"),
        (
            "epyc-135m",
            "exact/bf16",
            "its engine is real, the engines of this fleet are emulated (epyc-135m)",
        ),
        ("epyc-135m", "emulated/h100-70b", "its engine is emulated (h100-70b)"),
    ],
)
async def test_a_worker_of_the_other_kind_gets_no_request(make_fleet, fleets, alien, said) -> None:
    own = f"emulated/{fleets}" if fleets else "exact/bf16"
    workers = {"decode-0": Script(numerics_id=own), "decode-1": Script(numerics_id=alien)}
    fleet = await make_fleet(workers, emulated=fleets)
    for _ in range(6):
        route = (await fleet.chat()).headers["x-baton-route"]
        assert "decode=decode-0" in route
    refused = {w["id"]: w["refused"] for w in (await fleet.http.get("/fleet")).json()["workers"]}
    assert refused["decode-0"] == ""
    assert said in refused["decode-1"]
