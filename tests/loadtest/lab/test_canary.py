"""The lab `canary` against a fleet that exists in this file only, and what it concludes."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from baton.config.load import load_config
from loadtest.client.server import ServerError
from loadtest.lab import canary as lab
from loadtest.lab.canary_findings import MeasuredCandidate, findings_of
from loadtest.lab.places import _emulated
from loadtest.lab.table import LABS, LabContext

MODELS = tuple(LABS["canary"].timings)


class View:
    """A fleet that takes slow canaries out after 100 requests, and wrong ones at once."""

    def __init__(self, models: tuple[str, ...] = MODELS) -> None:
        self._names = models
        self.canary = ""
        self.golden: set[str] = set()
        self.requests = 0
        self.calls: list[dict[str, Any]] = []

    async def __aenter__(self) -> "View":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def models(self) -> dict[str, Any]:
        self.requests += 30
        reason = "p95 ITL" if self.canary == "chat@3" and self.requests > 100 else ""
        reason = "golden prompt" if self.canary in self.golden else reason
        gate = {"canary": {"requests": self.requests}} if self.canary and not reason else None
        entry = {"gate": gate, "thrown_out": self.canary if reason else "", "reason": reason}
        return {"models": [{"name": name} for name in self._names], "routes": {"chat": entry}}

    async def change_models(self, body: dict[str, Any]) -> str:
        self.calls.append(body)
        if body["verb"] == "gate":
            self.golden = {body["name"]} if body["golden"] else set()
        if body["verb"] in ("alias", "rollback", "canary"):
            self.canary = body["model"] if body["verb"] == "canary" else ""
            self.requests = 0
        return ""


async def _load(_: LabContext, seconds: float, ended: asyncio.Event) -> list[SimpleNamespace]:
    await asyncio.sleep(0.1)
    ended.set()
    return [SimpleNamespace(end="ok")] * 9 + [SimpleNamespace(end="http_error")]


@pytest.fixture
def view(monkeypatch: pytest.MonkeyPatch) -> View:
    found = View()
    monkeypatch.setattr(lab, "FleetView", lambda *_: found)
    monkeypatch.setattr(lab, "_load", _load)
    for name in ("_SETTLE_S", "_POLL_S", "_WRONG_AFTER_S"):
        monkeypatch.setattr(lab, name, 0.01)
    return found


def test_the_good_candidate_stays_and_the_bad_ones_are_rolled_back(
    view: View, capsys: pytest.CaptureFixture[str]
) -> None:
    found = lab.run(LabContext(url="http://x", api_key="k"))
    told = capsys.readouterr().err
    assert "candidate 2 of 3, slow: chat@3 gets 50 % of 8 requests/s for 60 s" in told
    rows = {row[0]: row for row in found.rows}
    assert rows["equal"][2] is None
    assert (rows["slow"][1], rows["slow"][3], rows["slow"][4]) == ("chat@3", 90, "p95 ITL")
    assert rows["wrong"][4] == "golden prompt"
    assert "All as they should be. 3 of 30 requests of clients failed." in found.sentence
    assert not view.golden
    verbs = [call["verb"] for call in view.calls]
    assert verbs == [
        *("alias", "canary", "rollback"),
        *("alias", "canary"),
        *("alias", "canary", "gate", "gate"),
    ]


def test_a_fleet_without_the_versions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "FleetView", lambda *_: View(("chat@1",)))
    with pytest.raises(ServerError, match="does not serve chat@2"):
        lab.run(LabContext(url="http://x", api_key="k"))


def candidate(kind: str, out_s: float | None) -> MeasuredCandidate:
    reason = "" if out_s is None else "because"
    return MeasuredCandidate(
        kind=kind, model="m", requests=7, out_s=out_s, reason=reason, sent=10, failed=0
    )


def test_wrong_verdicts_are_named() -> None:
    tried = [candidate("equal", 3.0), candidate("slow", None), candidate("wrong", 1.25)]
    found = findings_of(tried, rate=8.0, share=0.5, seconds=60.0)
    assert "equal: rolled back after 3.0 s and 7 of its requests; slow: stayed" in found.sentence
    assert "Not as it should be: equal, slow." in found.sentence
    assert {len(row) for row in found.rows} == {len(found.columns)}
    msgspec.json.encode(found)


def test_the_fleet_that_the_lab_starts_is_valid(tmp_path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(_emulated(4, "secret-key", LABS["canary"].timings))
    config = load_config(file)
    assert [lane.pools.engine.emulated for lane in config.lanes] == [
        *("h100-70b", "h100-70b", "epyc-135m")
    ]
    assert {lane.pools.total for lane in config.lanes} == {1}
    assert config.slo is None  # which would refuse requests
