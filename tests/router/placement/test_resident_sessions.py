"""Sessions that pause are counted where they will come again, and new ones are spread."""

import random

import pytest

from baton.types.params import SamplingParams
from benchmarks.placement import fleet, placer_of
from loadtest.simulator.setup import Setup
from loadtest.simulator.simulation import Simulation
from loadtest.workloads.traces import TraceRequest
from router.request import GenerationRequest
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.placement.resident_sessions import ResidentSessions

MINUTE_NS = 60 * 10**9
NAMES = [number.to_bytes(16, "big") for number in range(1, 2000)]


def prompt(blocks: int, session: int = 0) -> bytes:
    own = [bytes([session, *name[1:]]) for name in NAMES[100:blocks]]
    return b"".join([*NAMES[:100], *own])


def test_a_turn_continues_the_session_whose_prompt_it_begins_with():
    sessions = ResidentSessions()
    sessions.note(prompt(120), b"", "a", 0)
    assert not sessions.find(prompt(150, session=1), 100).tip
    # The response of ten blocks is cached, too.
    tip = sessions.find(prompt(150), 130).tip
    assert tip == prompt(120)[-16:]
    sessions.note(prompt(150), tip, "b", 0)
    assert sessions.expected_delays(["a", "b"]) == [0.0, 0.2]
    assert sessions.find(prompt(170), 150).tip == prompt(150)[-16:]


def test_sessions_are_forgotten_after_minutes():
    sessions = ResidentSessions()
    for session in range(10):
        sessions.note(prompt(120, session), b"", "a", session * MINUTE_NS)
    assert sessions.expected_delays(["a", "b"]) == [pytest.approx(0.2 * 5**2), 0.0]
    assert not sessions.find(prompt(150, session=2), 120).tip
    sessions.note(prompt(120, 9), prompt(120, 9)[-16:], "a", 30 * MINUTE_NS)
    assert sessions.expected_delays(["a", "b"]) == [pytest.approx(0.2), 0.0]


def test_the_last_block_of_a_prompt_need_not_be_cached():
    """A repeated prompt of whole blocks counted as a new session, and went to another server."""
    sessions = ResidentSessions()
    sessions.note(prompt(120), b"", "a", 0)
    assert sessions.find(prompt(120), 119) == (prompt(120)[-16:], True, False)
    assert sessions.find(prompt(150), 119) == (prompt(120)[-16:], True, True)
    assert sessions.find(prompt(150), 112).is_cached, "vLLM's blocks on CPUs have 128 tokens"
    assert not sessions.find(prompt(150), 100).is_cached
    assert not sessions.find(prompt(120), 0).is_cached


def test_a_session_that_moves_is_delayed_by_those_that_its_worker_has_not():
    sessions = ResidentSessions()
    for session, worker in enumerate("aabbbb"):
        sessions.note(prompt(120, session), b"", worker, 0)
    delays = sessions.expected_delays(["a", "b", "c"], prompt(120, 0)[-16:])
    assert delays == [0.0, pytest.approx(0.2 * 2), 0.0]


def test_sessions_end_when_they_are_not_continued_for_minutes():
    """Beginnings do not count: 24 of them made the sessions behind them cheap to move."""
    sessions = ResidentSessions()
    for session in range(40):
        sessions.note(prompt(120, session), b"", "a", 0)
        sessions.note(prompt(130, session), prompt(120, session)[-16:], "a", 0)
    assert sessions.continued_share.value == 1.0
    for turn in range(3):  # half of them are continued, and then none
        for session in range(20):
            tip = prompt(130 + 10 * turn, session)[-16:]
            sessions.note(prompt(140 + 10 * turn, session), tip, "a", 3 * turn * MINUTE_NS)
    assert 0.6 < sessions.continued_share.value < 0.9
    sessions.note(prompt(120, 99), b"", "a", 30 * MINUTE_NS)
    assert sessions.continued_share.value < 0.4


def test_new_sessions_go_to_the_worker_with_fewest_where_it_costs_the_same():
    """Short ones count as well: at random one server got so many that it forgot most of them."""
    placer = placer_of(fleet(0, 4, random.Random(1)))
    for slot in placer._workers:
        slot.link.status.queued_prompt_tokens = slot.link.status.running = 0
        slot.link.status.answering = 0
    places = []
    for number in range(24):
        request = GenerationRequest(
            request_id=str(number),
            prompt=tuple(range(1000 * number, 1000 * number + 320)),
            sampling=SamplingParams(max_tokens=8),
            arrived_ns=0,
            deadline_ns=10**18,
        )
        places.append(placer.place(request).decode_id)
        placer.release(str(number))
    assert sorted(map(places.count, set(places))) == [6, 6, 6, 6]


def test_a_session_is_recognised_when_it_is_short_and_when_it_was_evicted():
    placer = placer_of(fleet(0, 4, random.Random(1)))
    continues = []
    for number, tokens in enumerate((320, 664, 664)):
        request = GenerationRequest(
            request_id=str(number),
            prompt=tuple(range(tokens)),
            sampling=SamplingParams(max_tokens=8),
            arrived_ns=0,
            deadline_ns=10**18,
        )
        quote = placer.quote(request)
        placer._prefix_index = PrefixIndex()  # which expects no blocks
        placer.place(request, quote=quote)
        continues.append(quote.session.continues)
    assert continues == [False, True, False], "the last one repeats a prompt"


def paced(*, sessions: int, turns: int, pause_s: float, first: int = 1000) -> list[TraceRequest]:
    """Sessions with a common prompt of 18,000 tokens, one a second, and a pause between turns.

    A turn adds 1,000 tokens, the first one ``first``.
    """
    trace = []
    for session in range(sessions):
        for turn in range(turns):
            tokens = 18_000 + first + 1000 * turn
            own = [f"{session}/{block}" for block in range(18_000 // 16, -(-tokens // 16))]
            names = (*map(str, range(18_000 // 16)), *own)
            at_s = session * (1 + 1 / 64) + turn * (pause_s + 1 / 32)
            trace.append(TraceRequest(at_s, tokens, 60, names))
    return sorted(trace, key=lambda request: request.arrival_s)


@pytest.mark.parametrize(
    ("prefill", "decode", "mode", "pause_s", "first"),
    [
        (0, 4, "colocated", 60.0, 1000),
        (0, 4, "colocated", 10.0, 50),  # first turns are much shorter than later ones
        (4, 4, "disaggregated", 10.0, 1000),
        (4, 4, "disaggregated", 60.0, 50),  # no worker may count as slow by short prompts
    ],
)
def test_forty_paced_sessions_are_spread_over_four_workers(prefill, decode, mode, pause_s, first):
    """Between their turns no worker has load: all sessions went to two of the four."""
    trace = paced(sessions=40, turns=6, pause_s=pause_s, first=first)
    setup = Setup(
        prefill_workers=prefill,
        decode_workers=decode,
        mode=mode,
        block_tokens=16,
        prefill_kv_tokens=1_048_576,
        max_step_tokens=512,
        spread_s=0.0,
    )
    simulation = Simulation(setup, trace)
    records = simulation.run()
    requests = dict.fromkeys(simulation.computing, 0)
    for record in records:
        requests[record.computed_on] += 1
    assert len(requests) == 4 and not any(record.error for record in records)
    assert max(requests.values()) / (len(records) / 4) <= 1.3
    cached = sum(record.cached_tokens for record in records)
    assert cached / sum(record.prompt_tokens for record in records) >= 0.9
