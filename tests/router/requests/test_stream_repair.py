"""What a broken stream lost comes again; what nobody waits for is called off."""

import asyncio
import itertools
from types import SimpleNamespace

import msgspec
import pytest
from batonpb import common_pb2 as common
from batonpb import decode_pb2 as pb

from router.request import Shown
from router.routing.requests import stream_repair
from tests.router.requests.fake_links import FakeLink, end, fake_gateway, request, run

IDS = list(range(1000, 1008))


@pytest.fixture
async def one(model):
    """A request on one worker whose first three tokens have come."""
    gateway = fake_gateway(model)
    link = FakeLink(gateway, "decode-0")
    active = gateway.submit(request(), asyncio.Event())
    link.say(tokens=[run(0, IDS[:3])])
    return SimpleNamespace(gateway=gateway, link=link, active=active, record=active.record)


def answer_to_resume(one) -> None:
    """What the worker says of an ended request when it reads the resume."""
    begin = one.link.sent("resume")[-1].next_index[0]
    one.link.say(tokens=[run(begin, IDS[begin:], "length")], ends=[end()])


@pytest.mark.parametrize("together", [True, False])
async def test_an_end_behind_a_hole_waits_for_the_resume(one, together):
    """Defect 9: the final run and the end, said before the resume was read, were a 500."""
    one.link.broken()
    one.link.open_again()
    final, ended = run(6, IDS[6:], "length"), end()
    if together:
        one.link.say(tokens=[final], ends=[ended])
    else:
        one.link.say(tokens=[final])
        one.link.say(ends=[ended])
    assert not one.record.ended
    assert len(one.link.sent("resume")) == 1, "that of the new stream is on its way"
    answer_to_resume(one)
    assert one.record.error is None
    assert one.record.choices[0].token_ids == IDS
    assert one.gateway.in_flight == 0


async def test_every_order_of_frames_gives_the_whole_answer(model):
    """Defect 9: whatever comes first, a complete answer is no error."""
    pieces = [
        {"tokens": [run(3, IDS[3:5])]},
        {"tokens": [run(6, IDS[6:], "length")]},
        {"ends": [end()]},
    ]
    for order in itertools.permutations(pieces):
        for reopened in (True, False):
            gateway = fake_gateway(model)
            link = FakeLink(gateway, "decode-0")
            active = gateway.submit(request(), asyncio.Event())
            link.say(tokens=[run(0, IDS[:3])])
            if reopened:
                link.broken()
                link.open_again()
            for piece in order:
                link.say(**piece)
            assert not active.record.ended
            begin = link.sent("resume")[-1].next_index[0]
            link.say(tokens=[run(begin, IDS[begin:], "length")], ends=[end()])
            assert active.record.error is None
            assert active.record.choices[0].token_ids == IDS


async def test_a_hole_is_asked_for_once(one, monkeypatch):
    """Defect 9: every run behind a hole asked for all of the answer again."""
    for index in (4, 5, 6):
        one.link.say(tokens=[run(index, IDS[index : index + 1])])
    assert [list(resume.next_index) for resume in one.link.sent("resume")] == [[3]]
    one.link.say(tokens=[run(3, IDS[3:7])])
    one.link.say(tokens=[run(8, [7])])
    assert [list(resume.next_index) for resume in one.link.sent("resume")] == [[3], [7]]
    monkeypatch.setattr(stream_repair, "_ASK_AGAIN_NS", 0)
    one.link.say(tokens=[run(9, [7])])
    assert len(one.link.sent("resume")) == 3, "an answer that does not come is asked for again"


async def test_a_second_end_without_the_tokens_is_the_workers_fault(one):
    one.link.say(ends=[end()])
    assert not one.record.ended
    assert len(one.link.sent("resume")) == 1
    one.link.say(ends=[end()])
    assert one.record.error.code == "internal_error"


async def test_an_early_end_does_not_outlive_its_worker(one):
    one.link.say(ends=[end()])
    FakeLink(one.gateway, "decode-1")
    one.link.die("gone", died=True)
    assert one.record.attempt == 2
    assert not one.record.ended


# --- what nobody waits for ------------------------------------------------------------------------


async def test_runs_of_unknown_requests_are_answered_with_one_cancel(one):
    """Defect 6: an orphan ran on to its last token, and the router looked on."""
    for index in range(3):
        one.link.say(tokens=[run(index, [7], request_id="who", attempt=2)])
    assert [(c.request_id, c.attempt) for c in one.link.sent("cancel")] == [("who", 2)]
    one.link.broken()
    one.link.open_again()
    one.link.say(tokens=[run(3, [7], request_id="who", attempt=2)])
    assert len(one.link.sent("cancel")) == 2, "the first one may have been lost"


async def test_an_older_attempt_is_cancelled_where_it_runs(one):
    """Defect 6: a long prompt that overtook its resume ran beside the second attempt."""
    other = FakeLink(one.gateway, "decode-1")
    error = common.Error(code="unavailable", message="does not hold it", retryable=True)
    one.link.say(ends=[end(error=error)])
    assert one.record.attempt == 2
    assert [submit.attempt for submit in other.sent("submit")] == [2]
    one.link.say(tokens=[run(0, IDS[:1])])
    assert [(c.request_id, c.attempt) for c in one.link.sent("cancel")] == [("r", 1)]
    assert not other.sent("cancel")
    other.say(tokens=[run(0, IDS, "length", attempt=2)], ends=[end(2)])
    assert one.record.choices[0].token_ids == IDS


async def test_a_prefill_asked_for_by_an_unknown_request_is_cancelled(one):
    needed = pb.PrefillNeeded(request_id="who", attempt=1)
    one.link.say(prefill_needed=[needed])
    one.link.say(prefill_needed=[needed])
    assert [c.request_id for c in one.link.sent("cancel")] == ["who"]


async def test_what_was_cancelled_is_remembered_within_bounds(one, monkeypatch):
    monkeypatch.setattr(stream_repair, "_KEPT_CANCELS", 4)
    for number in range(9):
        one.link.say(tokens=[run(0, [7], request_id=f"who-{number}")])
    assert len(one.gateway.events._stream_repair._cancelled) == 4


async def test_a_cancel_that_a_broken_stream_may_have_lost_is_said_again(one):
    """Defect 6: the worker went on for a client that had left."""
    one.gateway.cancel(one.active)
    one.link.broken()
    one.link.open_again()
    assert len(one.link.sent("cancel")) == 2


@pytest.mark.parametrize("n", [1, 2])
async def test_a_cancel_by_a_stop_string_is_repeated_on_a_new_stream(model, n):
    """Cancels of a whole request, and of one choice of several."""
    gateway = fake_gateway(model)
    link = FakeLink(gateway, "decode-0")
    stop = model.tokenizer.decode(IDS[1:2])
    gateway.submit(request(n=n, shown=Shown(stops=(stop,))), asyncio.Event())
    link.say(tokens=[run(0, IDS[:3])])
    expected = [(0,) if n > 1 else ()]
    assert [tuple(cancel.choices) for cancel in link.sent("cancel")] == expected
    link.broken()
    link.open_again()
    assert [tuple(cancel.choices) for cancel in link.sent("cancel")] == 2 * expected
    assert len(link.sent("resume")) == (n > 1)


async def test_a_response_that_ended_at_its_worker_is_not_cancelled_on_a_new_stream(one):
    one.link.say(tokens=[run(3, IDS[3:], "length")])
    one.link.broken()
    one.link.open_again()
    assert not one.link.sent("cancel")


# --- a prefill worker that failed -----------------------------------------------------------------


@pytest.fixture
async def handed_off(model):
    """A request on decode-0 whose prompt prefill-0 computes; prefill-1 stands by."""
    gateway = fake_gateway(model)
    links = {name: FakeLink(gateway, name) for name in ("decode-0", "prefill-0")}
    active = gateway.submit(request(mode="disaggregated"), asyncio.Event())
    links["prefill-1"] = FakeLink(gateway, "prefill-1")
    return SimpleNamespace(gateway=gateway, active=active, record=active.record, **{
        name.replace("-", "_"): link for name, link in links.items()
    })  # fmt: skip


def ask(fleet, failed: FakeLink, *, peer_died: bool = True, code: str = "") -> None:
    target = pb.PrefillTarget(worker_id=failed.worker_id, incarnation=failed.incarnation)
    needed = pb.PrefillNeeded(
        request_id="r",
        attempt=1,
        failed=target,
        peer_died=peer_died,
        reason=common.Error(code=code),
    )
    fleet.decode_0.say(prefill_needed=[needed])


def withdraw(fleet, link: FakeLink) -> None:
    """The worker has changed its role, and gives the prompt back."""
    ask(fleet, link, peer_died=False, code="unavailable")


def turn(fleet, link: FakeLink, role: str) -> None:
    record = fleet.gateway.workers.get(link.worker_id).record
    turned = msgspec.structs.replace(record, role=role, turn=record.turn + 1)
    fleet.gateway.workers._upsert(turned)


async def test_a_prompt_may_come_back_to_a_worker_that_changed_its_role_twice(handed_off):
    fleet = handed_off
    for link in (fleet.prefill_0, fleet.prefill_1, fleet.prefill_0):
        withdraw(fleet, link)
    chosen = [one.prefill.worker_id for one in fleet.decode_0.sent("replacement")]
    assert chosen == ["prefill-1", "prefill-0", "prefill-1"]
    assert not fleet.record.ended
    assert booked(fleet) == {"prefill-1": 1}


async def test_a_prompt_waits_for_a_worker_that_changes_its_role(handed_off):
    """Every other prefill worker has changed its own meanwhile."""
    fleet = handed_off
    turn(fleet, fleet.prefill_0, "decode")
    turn(fleet, fleet.prefill_1, "decode")
    withdraw(fleet, fleet.prefill_0)
    assert fleet.active.wants_prefill
    assert fleet.decode_0.sent("replacement") == []
    turn(fleet, fleet.prefill_0, "prefill")
    [answer] = fleet.decode_0.sent("replacement")
    assert answer.prefill.worker_id == "prefill-0"
    assert not fleet.active.wants_prefill


def booked(fleet) -> dict[str, int]:
    return {
        name: len(worker.live)
        for name, worker in fleet.gateway.book._workers.items()
        if name.startswith("prefill") and worker.live
    }


async def test_the_same_question_gets_the_same_answer(handed_off):
    """Defect 4: an answer that a broken stream lost was never given again."""
    fleet = handed_off
    ask(fleet, fleet.prefill_0)
    FakeLink(fleet.gateway, "prefill-2")
    for _ in range(3):
        fleet.decode_0.broken()
        fleet.decode_0.open_again()
        ask(fleet, fleet.prefill_0)
    answers = fleet.decode_0.sent("replacement")
    assert [answer.prefill.worker_id for answer in answers] == ["prefill-1"] * 4
    assert fleet.record.died_holding == {fleet.prefill_0.incarnation}
    assert booked(fleet) == {"prefill-1": 1}


async def test_an_answer_whose_worker_died_meanwhile_is_decided_anew(handed_off):
    """Defect 4: and it is booked once."""
    fleet = handed_off
    ask(fleet, fleet.prefill_0)
    FakeLink(fleet.gateway, "prefill-2")
    fleet.prefill_1.die("gone", died=True)
    ask(fleet, fleet.prefill_0)
    answers = fleet.decode_0.sent("replacement")
    assert [answer.prefill.worker_id for answer in answers] == ["prefill-1", "prefill-2"]
    assert booked(fleet) == {"prefill-2": 1}
    assert not fleet.record.ended


async def test_a_question_asked_twice_while_waiting_is_answered_when_a_worker_comes(handed_off):
    """Defect 4: a resume after a reopen leads to an answer."""
    fleet = handed_off
    fleet.prefill_1.die("gone", died=False)
    ask(fleet, fleet.prefill_0)
    ask(fleet, fleet.prefill_0)
    assert fleet.decode_0.sent("replacement") == []
    timer = fleet.active.repair_timer
    fleet.prefill_1.incarnation = b"another life"
    fleet.prefill_1.open_again()
    [answer] = fleet.decode_0.sent("replacement")
    assert answer.prefill.incarnation == b"another life"
    assert timer.cancelled()
    ask(fleet, fleet.prefill_0)
    assert len(fleet.decode_0.sent("replacement")) == 2


async def test_an_old_question_that_comes_late_changes_nothing(handed_off):
    fleet = handed_off
    FakeLink(fleet.gateway, "prefill-2")
    ask(fleet, fleet.prefill_0, peer_died=False)
    first = fleet.decode_0.sent("replacement")[0].prefill.worker_id
    ask(fleet, fleet.gateway.workers.link(first), peer_died=False)
    ask(fleet, fleet.prefill_0, peer_died=False)
    assert len(fleet.decode_0.sent("replacement")) == 2
