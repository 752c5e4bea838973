"""What the lab `split` concludes from its measurements, and the fleet that it starts."""

import msgspec
import pytest

from baton.config.load import load_config
from loadtest.client.records import ServerOptions
from loadtest.goodput.phases import GoodLimits, PhaseFigures
from loadtest.lab import split as lab
from loadtest.lab.places import _emulated
from loadtest.lab.split_findings import MeasuredSplit, Steered, findings_of
from tests.loadtest.metrics.test_metrics import record

LIMITS = GoodLimits(ttft_s=2.0, itl_s=0.1, own_s=0.5)


def figures(rate: float, good: int, refused: int = 0) -> PhaseFigures:
    """Of 20 seconds, in which no request was late."""
    return PhaseFigures(
        name="",
        rate=rate,
        seconds=20.0,
        sent=good + refused,
        good=good,
        refused=refused,
        late=0,
        failed=0,
    )


SPLITS = [
    MeasuredSplit(prefill=1, decode=3, figures=figures(6.0, 20, 100)),
    MeasuredSplit(prefill=2, decode=2, figures=figures(6.0, 60, 60)),
    MeasuredSplit(prefill=3, decode=1, figures=figures(6.0, 30, 90)),
]
BASE = figures(2.5, 50)


def steered(good_per_s: list[float], start: str = "1 + 3") -> Steered:
    """A run with this many good responses per second in each 10 s, of 4 requests per second."""
    records = []
    for place, rate in enumerate(good_per_s):
        for number in range(40):
            start_s = 10.0 * place + number / 4
            good = {"chunk_s": [start_s + 1.0]} if number < 10 * rate else {"end": "http_error"}
            records.append(record(index=len(records), intended_s=start_s, status=429, **good))
    return Steered(
        start=start,
        rate=3.75,
        seconds=90.0,
        records=records,
        decisions=[(12.4, "worker-1 to prefill: 1 + 3 misses")],
    )


def test_the_planner_is_compared_with_the_best_split():
    rates = [2.5, 0.5, 2.2, 2.3, 2.5, 2.5, 2.5, 2.0, 2.4]
    found = findings_of(SPLITS, BASE, [steered(rates), steered([2.5] * 9, "3 + 1")], LIMITS, 200)
    assert found.sentence == (
        "2 + 2 is the best split: 3.00 good responses/s, and 2.50 at the 2.50 requests/s that it "
        "holds. From 1 + 3 at 1.5 x with the planner, the fleet served 0.92 of that after a "
        "minute, and 0.9 of it from 20 s on; changes by the planner: 1. From 3 + 1 at 1.5 x with "
        "the planner, the fleet served 1.00 of that after a minute, and 0.9 of it from 0 s on; "
        "changes by the planner: 1."
    )
    assert [row[0] for row in found.rows] == [
        *("1 + 3", "2 + 2", "3 + 1", "2 + 2 at 1.0 x"),
        "1 + 3 with the planner at 1.5 x, first minute",
        "1 + 3 with the planner at 1.5 x, after a minute",
        "3 + 1 with the planner at 1.5 x, first minute",
        "3 + 1 with the planner at 1.5 x, after a minute",
    ]
    assert found.rows[0][1:] == pytest.approx([6.0, 1.0, 1 / 6, 5 / 6, 1.0])
    assert found.rows[5][2:] == pytest.approx([2.3, 69 / 120, 51 / 120, 1.0])
    bars, line, other = found.plots
    assert (bars.labels, bars.series[0].y) == (["1 + 3", "2 + 2", "3 + 1"], [1.0, 3.0, 1.5])
    assert line.x[0] == 5.0
    assert other.title == "3 + 1 with the planner at 1.5 x"
    assert line.series[0].y == rates
    assert line.series[2].y == pytest.approx([2.25] * 9)
    assert "12 s: worker-1 to prefill: 1 + 3 misses" in line.caption
    assert {len(row) for row in found.rows} == {len(found.columns)}
    msgspec.json.encode(found)


def test_a_planner_that_stays_below_is_said_to():
    found = findings_of(SPLITS, BASE, [steered([3.0] + [1.0] * 8)], LIMITS, 200)
    assert (
        "the fleet served 0.40 of that after a minute, and 0.9 of it at no time" in found.sentence
    )


def test_the_fleet_that_the_lab_starts_is_valid(tmp_path):
    file = tmp_path / "fleet.yaml"
    file.write_text(_emulated(6, "secret-key", {}))
    config = load_config(file)
    assert (config.pools.prefill, config.pools.decode) == (1, 5)
    assert config.slo is not None
    assert config.api_keys["secret-key"].role == "operator"


@pytest.mark.parametrize(
    ("ends_at", "rows", "left_out"), [("split 3", 2, 3), ("rate", 3, 2), ("planner", 3, 2)]
)
def test_ctrl_c_keeps_the_splits_that_were_measured(monkeypatch, ends_at, rows, left_out):
    def measured_split(self, prefill, rate):
        if ends_at == f"split {prefill}":
            raise KeyboardInterrupt
        return SPLITS[prefill - 1]

    async def held(measure, figures):
        if ends_at == "rate":
            raise KeyboardInterrupt
        return BASE

    def steer(self, worst, rate):
        raise KeyboardInterrupt

    monkeypatch.setattr(lab._Lab, "_split", measured_split)
    monkeypatch.setattr(lab._Lab, "_become", lambda self, prefill: None)
    monkeypatch.setattr(lab._Lab, "_steer", steer)
    monkeypatch.setattr(lab, "held_rate", held)
    options = ServerOptions(url="http://a", model="m")
    found = lab._Lab(None, options, LIMITS, workers=4, seconds=1.0, quick=False).run()
    assert [row[0] for row in found.rows] == ["1 + 3", "2 + 2", "3 + 1"][:rows]
    assert found.left_out == left_out
    assert found.sentence.startswith("2 + 2 is the best of the measured splits: 3.00 good")
