"""Figures of the bench of shadow traffic."""

import pytest

from benchmarks.lanes.shadow import quantiles
from tests.loadtest.metrics.test_metrics import record


def test_latencies_count_from_the_planned_time() -> None:
    records = [
        record(index=n, intended_s=float(n), chunk_s=[n + 0.1, n + 0.3], ended_s=n + 0.4)
        for n in range(99)
    ]
    records.append(record(index=99, intended_s=0.0, chunk_s=[1.1, 3.1], ended_s=4.0))
    found = quantiles(records)
    assert found["TTFT"] == pytest.approx((0.1, 0.11), abs=0.02)
    assert found["longest gap"][0] == pytest.approx(0.2)
    assert found["longest gap"][1] > 0.2


def test_a_failed_request_makes_the_figures_void() -> None:
    with pytest.raises(RuntimeError, match="a request failed: http_error"):
        quantiles([record(index=0, end="http_error")])
