"""What one decode worker learns of a link, those beside it need not learn anew."""

import random

import pytest
from batonpb.common_pb2 import EdgeRate, WorkerIdentity, WorkerStatus

from benchmarks.placement import fleet
from router.routing.placement.booked_load import LoadBook
from router.routing.placement.congestion import Crowding
from router.routing.placement.edges import Links, ReportedEdges
from router.routing.placement.pricing import Asked
from router.routing.placement.shortlist import Shortlist
from router.routing.placement.worker_load import Reports, loads_of

FAST, SLOW = 1e9, 6e5  # of which the slow one is a link of 5 Mbit/s
HOSTS = {"prefill-0": "a", "prefill-1": "b", "decode-0": "c", "decode-1": "c", "decode-2": "d"}


def reported(worker_id, links=None, **rates):
    identity = WorkerIdentity(worker_id=worker_id, host=HOSTS.get(worker_id, "a"))
    edges = [
        EdgeRate(prefill_worker_id=source.replace("_", "-"), bytes_per_s=rate)
        for source, rate in rates.items()
    ]
    return ReportedEdges(WorkerStatus(identity=identity, edges=edges), links)


def test_a_worker_of_the_same_host_tells():
    links = Links()
    beside = reported("decode-1", links)
    links.learn(HOSTS, [reported("decode-0", prefill_0=SLOW, prefill_1=FAST), beside])
    assert beside.get("prefill-0") == SLOW
    assert beside.rates(["prefill-0", "prefill-1", "prefill-9"]) == [SLOW, FAST, 0.0]
    assert dict(beside) == {}, "what it has measured itself is nothing"


def test_what_leaves_a_host_is_slow_wherever_it_goes():
    links = Links()
    far = reported("decode-2", links)
    links.learn(HOSTS, [reported("decode-0", prefill_0=SLOW, prefill_1=FAST)])
    assert far.get("prefill-0") == SLOW
    assert far.get("prefill-1") == FAST


def test_what_reaches_a_host_is_slow_wherever_it_comes_from():
    links = Links()
    far = reported("decode-2", links, prefill_0=SLOW)
    links.learn(HOSTS, [reported("decode-0", prefill_0=FAST, prefill_1=FAST), far])
    assert far.get("prefill-1") == SLOW, "prefill-1 is fast to others, host d is not"
    assert far.get("prefill-0") == SLOW


def test_its_own_measurement_stands():
    links = Links()
    own = reported("decode-1", links, prefill_0=FAST)
    links.learn(HOSTS, [reported("decode-0", prefill_0=SLOW), own])
    assert own.get("prefill-0") == FAST


def test_memory_says_nothing_of_a_wire():
    hosts = {"prefill-0": "a", "decode-0": "a", "decode-1": "b"}
    links = Links()
    near = ReportedEdges(
        WorkerStatus(
            identity=WorkerIdentity(worker_id="decode-0", host="a"),
            edges=[EdgeRate(prefill_worker_id="prefill-0", bytes_per_s=FAST)],
        ),
        links,
    )
    far = ReportedEdges(WorkerStatus(identity=WorkerIdentity(host="b")), links)
    links.learn(hosts, [near, far])
    assert far.get("prefill-0") is None
    assert links.bytes_per_s("prefill-0", "a") == FAST


def test_one_worker_that_was_unlucky_does_not_speak_for_its_host():
    links = Links()
    others = [reported("decode-0", prefill_0=rate) for rate in (FAST, SLOW, FAST)]
    links.learn(HOSTS, others)
    assert links.bytes_per_s("prefill-0", "c") == FAST


def test_one_host_has_nothing_to_tell_apart():
    links = Links()
    links.learn(dict.fromkeys(HOSTS, "a"), [reported("decode-9", prefill_0=SLOW)])
    assert links.bytes_per_s("prefill-0", "a") == 0.0


def test_together_the_samples_of_many_workers_reach_every_edge():
    edges = {f"prefill_{i}": FAST for i in range(200)}
    samples = [reported(f"decode-{i}", **edges).sample for i in range(300)]
    assert max(map(len, samples)) <= 8
    assert len(set().union(*samples)) == 200


@pytest.mark.parametrize("native", [True, False])
def test_a_link_that_another_worker_found_slow_is_avoided(native):
    slots = fleet(2, 4, random.Random(0))
    hosts = ("p0", "p1", "here", "here", "there", "there")
    for slot, host in zip(slots, hosts, strict=True):
        status = slot.link.status
        status.identity.host = host
        status.queued_prompt_tokens = status.running = status.waiting = 0
        status.ClearField("edges")
    slots[2].link.status.edges.add(prefill_worker_id=slots[0].worker_id, bytes_per_s=SLOW)
    slots[2].link.status.edges.add(prefill_worker_id=slots[1].worker_id, bytes_per_s=FAST)
    short = Shortlist(Reports(), Crowding(), 0, native=native)
    short.update(slots, 0)
    asked = Asked("disaggregated", 1000, 64, 1, True)
    if native:
        placed = short.cheapest(asked, {}, LoadBook(), 0)
        if placed is None:
            pytest.skip("no compiler")
        assert {one.computes.slot.worker_id for one in placed[:3]} == {slots[1].worker_id}
    loads = loads_of(slots, [], None, LoadBook(), 0)
    assert [load.edge_bytes_per_s(slots[0].worker_id) for load in loads[3:]] == [SLOW] * 3
    assert [load.edge_bytes_per_s(slots[1].worker_id) for load in loads[3:]] == [FAST] * 3
