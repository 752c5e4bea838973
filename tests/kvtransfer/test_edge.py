"""Which transport an edge is pulled by: what both have, what was measured, what failed when."""

import pytest

from kvtransfer.edge import FIRST_COOL_DOWN_NS, MAX_COOL_DOWN_NS, Edge, EdgeRate, int8_pays

BOTH = ["shared_memory", "grpc"]
MIB = 1 << 20


def test_an_edge_is_as_fast_as_half_of_its_bytes_came() -> None:
    """What waited for the wire, and what was too small to tell, must not make it look slow."""
    edge = EdgeRate()
    assert not edge.measured
    edge.note(1_000, 1.0)  # tells of latency only
    assert not edge.measured
    edge.note(100_000_000, 0.01)
    assert edge.bytes_per_s == 1e10
    edge.note(100_000, 0.001)
    edge.note(90_000_000, 9.0)
    assert edge.bytes_per_s == 1e10
    for _ in range(9):
        edge.note(100_000_000, 0.1)
    assert edge.bytes_per_s == pytest.approx(1e9), "a change is believed after some pulls"


def test_the_first_that_both_have_is_taken_with_the_fallback_behind_it() -> None:
    edge = Edge()
    assert edge.ways(BOTH, 0) == BOTH
    assert edge.ways(["grpc"], 0) == ["grpc"]
    assert edge.ways([], 0) == []
    assert edge.ways(["shared_memory"], 0) == ["shared_memory"]


def test_one_that_was_measured_to_be_clearly_faster_is_taken_and_the_other_tried_now_and_then() -> (
    None
):
    edge = Edge()
    edge.note("shared_memory", 10 * MIB, 0.010)
    assert edge.ways(BOTH, 0) == BOTH
    edge.note("grpc", 10 * MIB, 0.009)
    assert edge.ways(BOTH, 0) == BOTH, "not clearly"
    for _ in range(9):
        edge.note("grpc", 10 * MIB, 0.001)
    taken = [edge.ways(BOTH, 0)[0] for _ in range(64)]
    assert taken.count("grpc") == 62
    assert edge.bytes_per_s == pytest.approx(10 * MIB / 0.001)


def test_one_that_failed_is_left_alone_and_tried_again_later_and_later() -> None:
    edge, now_ns, pause_ns = Edge(), 1, FIRST_COOL_DOWN_NS
    for _ in range(8):
        assert edge.ways(BOTH, now_ns) == BOTH
        edge.failed("shared_memory", now_ns)
        edge.failed("shared_memory", now_ns + 1)  # a second pull that had begun before
        assert edge.ways(BOTH, now_ns + pause_ns - 1) == ["grpc"]
        now_ns += pause_ns
        pause_ns = min(2 * pause_ns, MAX_COOL_DOWN_NS)
    edge.note("shared_memory", MIB, 0.001)
    edge.failed("shared_memory", now_ns)
    assert edge.ways(BOTH, now_ns + FIRST_COOL_DOWN_NS) == BOTH, "a pull that went well forgives"


def test_the_fallback_is_never_left_alone() -> None:
    edge = Edge()
    edge.failed("grpc", 0)
    assert edge.ways(BOTH, 0) == BOTH


def test_what_one_life_could_not_do_the_next_may() -> None:
    edge = Edge()
    edge.failed("shared_memory", 0)
    edge.begin_life()
    assert edge.ways(BOTH, 1) == BOTH


@pytest.mark.parametrize(
    ("bytes_per_s", "of_many_frames", "of_one"),
    [
        (5e6 / 8, True, True),
        (1e9 / 16, True, True),
        (1e9 / 8, True, False),
        (1.5e9 / 8, True, False),
        (2.5e9 / 8, False, False),
        (500e6, False, False),
    ],
)
def test_int8_pays_where_the_wire_is_slower_than_what_of_coding_is_seen(
    bytes_per_s: float, of_many_frames: bool, of_one: bool
) -> None:
    """Vectors of 64 values: 128 bytes plain, 68 in int8. 5 Mbit/s to gRPC on the loopback; at 0.05
    to 1.5 Gbit/s whole hand-offs were measured."""
    assert int8_pays(32 * MIB, 17 * MIB, bytes_per_s, 4 * MIB) == of_many_frames
    assert int8_pays(4 * MIB, 17 * MIB // 8, bytes_per_s, 4 * MIB) == of_one


def test_where_int8_hardly_saves_anything_the_wire_must_be_slower_still() -> None:
    assert int8_pays(100, 50, 90e6, 100)
    assert not int8_pays(100, 90, 90e6, 100)
    assert not int8_pays(100, 100, 1.0, 100)


def test_int8_is_asked_for_once_a_plain_pull_has_said_that_the_wire_is_slow() -> None:
    edge, size = Edge(), (128 * MIB, 68 * MIB, 4 * MIB)
    assert not edge.asks_int8("grpc", *size), "nothing is known yet"
    edge.note("grpc", MIB, 1.0)
    assert edge.asks_int8("grpc", *size)
    edge.note("grpc", MIB, 0.5, int8=True)
    assert edge.bytes_per_s == pytest.approx(2 * MIB), "what routers are told is what it delivers"
    assert edge.rate("grpc").bytes_per_s == pytest.approx(MIB)
    asked = [edge.asks_int8("grpc", *size) for _ in range(64)]
    assert asked.count(False) == 2, "now and then the wire is measured again"
    for _ in range(9):
        edge.note("grpc", 10 * MIB, 0.01)  # it has become fast
    assert not any(edge.asks_int8("grpc", *size) for _ in range(64))
    assert edge.bytes_per_s == pytest.approx(1000 * MIB)


def test_a_pull_in_int8_that_was_too_small_to_tell_leaves_what_is_known() -> None:
    edge = Edge()
    edge.note("grpc", MIB, 1.0)
    edge.note("grpc", 100, 1.0, int8=True)
    assert edge.bytes_per_s == pytest.approx(MIB)


def test_a_link_on_which_each_pull_is_late_is_known_to_be_slow_all_the_same() -> None:
    """2 Mbit/s. What a pull asks for and how long it waits are the puller's rules; no clock."""
    edge, plain_bytes, int8_bytes, wire_bytes_per_s = Edge(), 32 * MIB, 17 * MIB, 250e3
    late = 0
    while True:
        int8 = edge.asks_int8("grpc", plain_bytes, int8_bytes, 4 * MIB)
        assert int8 == (late > 0)
        budget_s = 1.0 + 4 * plain_bytes / edge.rate("grpc").bytes_per_s
        size_bytes = int8_bytes if int8 else plain_bytes
        if size_bytes <= wire_bytes_per_s * budget_s:
            break
        frame_bytes = edge.frame_bytes("grpc", 4 * MIB)
        came = int(wire_bytes_per_s * budget_s // frame_bytes)
        edge.note_late("grpc", size_bytes, (came + 1) * frame_bytes, budget_s)
        late += 1
    assert late <= 5
    assert edge.measured and wire_bytes_per_s < edge.bytes_per_s < 2e6
    assert edge.frame_bytes("grpc", 4 * MIB) < 2 * MIB, "one comes every few seconds, not a minute"


def test_one_late_pull_is_not_believed_against_many_that_were_not() -> None:
    """A peer that stood still for a moment; what came of a late pull says how fast at most."""
    edge = Edge()
    for _ in range(5):
        edge.note("grpc", 32 * MIB, 0.1)
    fast = edge.bytes_per_s
    edge.note_late("grpc", 32 * MIB, 4 * MIB, 1.5)
    assert edge.bytes_per_s == fast
    assert edge.frame_bytes("grpc", 4 * MIB) == 4 * MIB
    edge.note_late("shared_memory", 32 * MIB, 32 * MIB, 0.01)
    assert not edge.rate("shared_memory").measured, "it may be as fast as is assumed"
    for _ in range(5):
        edge.note_late("grpc", 32 * MIB, 4 * MIB, 1.5)
    assert edge.bytes_per_s == pytest.approx(4 * MIB / 1.5)
