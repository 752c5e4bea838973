"""Our histograms write the page that `prometheus_client`'s own write."""

import random
import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as Theirs

from baton.telemetry.histograms import Histogram

BOUNDS = (0.001, 0.01, 0.5, 1.0, 40.0)


def page(*collectors) -> str:
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    lines = generate_latest(registry).decode().splitlines()
    return "\n".join(line for line in lines if "_created" not in line)


def values() -> list[float]:
    draw = random.Random(3)
    return [*(draw.expovariate(3) for _ in range(500)), *BOUNDS, 0.0, 41.0]


def test_without_labels():
    ours = Histogram("wait_seconds", "A wait.", (), BOUNDS)
    theirs = Theirs("wait_seconds", "A wait.", buckets=BOUNDS, registry=None)
    assert page(ours) == page(theirs)  # nothing observed yet
    for value in values():
        ours.observe(value)
        theirs.observe(value)
    assert page(ours) == page(theirs)


def test_with_labels():
    labels = ("mode", "tenant")
    ours = Histogram("wait_seconds", "A wait.", labels, BOUNDS)
    theirs = Theirs("wait_seconds", "A wait.", labels, buckets=BOUNDS, registry=None)
    assert page(ours) == page(theirs)
    for place, value in enumerate(values()):
        given = ("auto" if place % 3 else 'od"d\n', str(place % 2))
        ours.labels(*given).observe(value)
        theirs.labels(*given).observe(value)
    assert page(ours) == page(theirs)


def test_several_at_once_are_as_many_one_by_one():
    at_once, one_by_one = (Histogram("x", "", (), BOUNDS) for _ in range(2))
    at_once.observe(0.25, 4)
    for _ in range(4):
        one_by_one.observe(0.25)
    assert page(at_once) == page(one_by_one)


def test_labels_that_are_missing_are_a_fault():
    with pytest.raises(ValueError, match="takes labels"):
        Histogram("x", "", ("mode",), BOUNDS).labels()
    with pytest.raises(ValueError, match="takes labels"):
        Histogram("x", "", (), BOUNDS).labels("auto")


def test_threads_lose_nothing():
    ours = Histogram("x", "", (), BOUNDS)

    def observe() -> None:
        for _ in range(20_000):
            ours.observe(0.2)

    threads = [threading.Thread(target=observe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "x_count 80000.0" in page(ours)
