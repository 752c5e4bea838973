"""The receiving machine where peers die, lie, or publish a great deal."""

import itertools
import sys
from collections.abc import Callable

import pytest

from baton.types.events import Published
from baton.types.geometry import KvGeometry
from kvtransfer.kv_slice import KvSlice, cut
from kvtransfer.receiver import MAX_REOPENS, HandoffReceiver, ReceiverState
from kvtransfer.receiver_actions import AskForPeer, CloseStream, KvLoaded, LoadKv, OpenStream, Pull
from kvtransfer.sender import HandoffSender

GEOMETRY = KvGeometry(num_layers=4, num_kv_heads=2, head_dim=8, num_blocks=64, dtype="bf16")


def pulling(window_frames: int = 8) -> tuple[HandoffReceiver, list[KvSlice]]:
    """A receiver that has its pages, and what it has asked for: the first layer."""
    machine = HandoffReceiver(GEOMETRY, 40, window_frames=window_frames)
    machine.reserved(1, 0, 0)
    machine.accepted(resumed=False, now_ns=0)
    machine.published(layer(0), 0)
    return machine, asked_of(machine.bound(1, (5, 6, 7)))


def layer(number: int, tokens: int = 40) -> KvSlice:
    return KvSlice(number, 1, 0, 2, 0, -(-tokens // 16), tokens)


def asked_of(actions: list) -> list[KvSlice]:
    return [piece for action in actions if isinstance(action, Pull) for piece in action.kv_slices]


def test_pulls_that_break_together_say_nothing_about_the_peer() -> None:
    """Defect 1: the control stream is the judge, also when it speaks last."""
    machine, first = pulling()
    asked = [first, *(asked_of(machine.published(layer(n), 0)) for n in (1, 2, 3))]
    assert all(asked)
    for pieces in asked:
        assert machine.pull_failed(pieces, "UNAVAILABLE", machine.epoch) == []
    (_, ask) = machine.stream_lost(peer_gone=True, reason="refused")
    assert ask == AskForPeer("refused", peer_died=True)


@pytest.mark.parametrize("order", sorted(set(itertools.permutations("ppphb"))))
def test_a_death_is_a_death_in_whatever_order_its_signs_come(order: tuple[str, ...]) -> None:
    """Pulls that break, a heartbeat and a rectangle that were under way: then the stream breaks."""
    machine, asked = pulling(window_frames=2)
    asked += asked_of(machine.published(layer(1), 0))
    assert len(asked) == 2
    number = 2
    for sign in order:
        match sign:
            case "p" if asked:
                machine.pull_failed([asked.pop()], "UNAVAILABLE", machine.epoch)
            case "h":
                asked += asked_of(machine.peer_lives(1))
            case "b":
                asked += asked_of(machine.published(layer(number), 1))
                number += 1
    actions = machine.stream_lost(peer_gone=True, reason="refused")
    assert AskForPeer("refused", peer_died=True) in actions


def test_an_ask_that_nobody_answers_is_repeated() -> None:
    """Defect 4: the ask, or its answer, may be lost with a stream."""
    machine, _ = pulling()
    machine.stream_lost(peer_gone=True, reason="refused")
    second = 10**9
    again = AskForPeer("refused", peer_died=True, again=True)
    asked_at_s = [at_s for at_s in range(100, 120) if machine.tick(at_s * second) == [again]]
    assert asked_at_s == [105, 110, 115]
    machine.replaced(120 * second)
    assert machine.tick(126 * second) == []
    machine.stream_lost(peer_gone=False, reason="broke")
    machine.prefill_failed("refused again")
    assert machine.tick(127 * second) == [], "the time runs from the ask"
    machine.cancel()
    assert machine.tick(200 * second) == []


def test_a_resumed_stream_is_asked_again_at_once() -> None:
    """Defect 4."""
    machine, _ = pulling()
    assert machine.ask_again() == []
    machine.prefill_failed("full")
    assert machine.ask_again() == [AskForPeer("full", peer_died=False, again=True)]


def test_an_answer_that_comes_twice_changes_nothing() -> None:
    """Defect 4: an ask that is repeated may be answered as often."""
    machine, _ = pulling()
    machine.prefill_failed("full")
    machine.replaced(0)
    assert machine.compute_locally() == []
    assert machine.state is ReceiverState.OPENING


def test_a_heartbeat_goes_on_with_what_was_lost() -> None:
    machine, pieces = pulling()
    machine.pull_failed(pieces, "too slow", machine.epoch)
    assert asked_of(machine.published(layer(1), 0)) == []  # paused
    assert set(asked_of(machine.peer_lives(1))) == {*pieces, *cut(layer(1), GEOMETRY)}


@pytest.mark.parametrize("late", ["bad", "stored", "gone"])
def test_nothing_is_pulled_anew_while_a_frame_of_before_is_being_written(late: str) -> None:
    """A damaged frame wipes its pages: it must not wipe what the next peer has put there."""
    machine, (piece,) = pulling()
    before = machine.epoch
    assert machine.frame_arrived(piece, before)
    machine.prefill_failed("full")
    machine.replaced(0)
    machine.accepted(resumed=False, now_ns=0)
    assert asked_of(machine.published(layer(0), 0)) == []
    assert asked_of(machine.bound(1, (5, 6, 7))) == []
    match late:
        case "bad":
            actions = machine.frame_bad(piece, before)
        case "stored":
            actions = machine.frame_stored(piece, before, 0)
        case "gone":
            actions = machine.frame_gone(piece, before)
    assert asked_of(actions) == [piece]
    assert machine.frame_arrived(piece, machine.epoch)
    assert asked_of(machine.published(layer(1), 0)), "writes of now hold nothing up"


def test_a_peer_that_lives_and_serves_no_pull_is_given_up_alive() -> None:
    machine, asked = pulling()
    for _ in range(3):
        assert machine.pull_failed(asked, "too slow", machine.epoch) == []
        asked = asked_of(machine.peer_lives(1))
    assert machine.pull_failed(asked, "too slow", machine.epoch) == []
    (_, ask) = machine.peer_lives(1)
    assert ask == AskForPeer("too slow", peer_died=False)


def test_the_last_pull_that_breaks_waits_for_the_judge_too() -> None:
    """Defect 1: a peer that served no pull while it lived, and then died, has died."""
    machine, asked = pulling()
    for _ in range(3):
        machine.pull_failed(asked, "too slow", machine.epoch)
        asked = asked_of(machine.peer_lives(1))
    assert machine.pull_failed(asked, "UNAVAILABLE", machine.epoch) == []
    (_, ask) = machine.stream_lost(peer_gone=True, reason="refused")
    assert ask == AskForPeer("refused", peer_died=True)


@pytest.mark.parametrize(
    "strange",
    [
        KvSlice(0, 1, 0, 2, 0, 4, 64),  # inside the model, beyond a prompt of 40 tokens
        KvSlice(0, 1, 0, 2, 2, 1, 9),  # one token beyond it
        KvSlice(3, 2, 0, 2, 0, 1, 16),
        KvSlice(0, 1, 1, 2, 0, 1, 16),
        KvSlice(0, 1, 0, 2, 1 << 40, 1, 16),
    ],
)
def test_a_rectangle_outside_the_prompt_gives_the_peer_up(strange: KvSlice) -> None:
    """Defect 7: it must not come as far as the pages."""
    machine, _ = pulling()
    (_, ask) = machine.published(strange, 0)
    assert "outside the model or the prompt" in ask.reason
    assert machine.state is ReceiverState.NO_PEER


def test_blocks_that_are_published_twice_give_the_peer_up() -> None:
    machine, _ = pulling()
    assert machine.published(layer(0), 0) == []  # the same words on a resumed stream
    (_, ask) = machine.published(KvSlice(0, 2, 0, 2, 1, 1, 16), 0)
    assert "twice" in ask.reason


@pytest.mark.parametrize(
    ("published", "complete"),
    [
        ([KvSlice(0, 4, 0, 2, 1, 2, 24)], True),
        ([KvSlice(0, 4, 0, 1, 1, 2, 24), KvSlice(0, 4, 1, 1, 1, 2, 24)], True),
        ([KvSlice(0, 4, 0, 1, 1, 2, 24)], False),  # half of the heads is not the whole
        ([KvSlice(0, 3, 0, 2, 1, 2, 24)], False),
        ([KvSlice(0, 4, 0, 2, 1, 1, 16)], False),
        ([KvSlice(0, 4, 0, 2, 0, 3, 40)], False),  # what decode had is not to be sent
        ([], False),
    ],
)
def test_a_hand_off_is_complete_with_every_layer_block_and_head(published, complete) -> None:
    machine = HandoffReceiver(GEOMETRY, 40)
    machine.reserved(1, 1, 0)
    machine.accepted(resumed=False, now_ns=0)
    for kv_slice in published:
        machine.published(kv_slice, 0)
    assert machine._published.complete(machine.skip_blocks) is complete


def test_frames_that_we_lack_the_credit_to_ask_for_are_no_stall_of_the_peer() -> None:
    machine, _ = pulling()
    machine.held_back(machine.stall_ns)
    assert machine.tick(machine.stall_ns + 1) == []
    (close, ask) = machine.tick(2 * machine.stall_ns + 1)
    assert isinstance(ask, AskForPeer) and not ask.peer_died, close


def python_calls(work: Callable[[], None]) -> int:
    """Calls into Python functions, comparisons of dataclasses among them."""
    count = 0

    def note(_frame, event, _argument) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_work_grows_with_the_prompt_and_not_with_its_square(side: str) -> None:
    """Defect 10: a rectangle and a frame cost their own blocks, however many went before."""
    geometry = KvGeometry(num_layers=8, num_kv_heads=2, head_dim=8, num_blocks=1, dtype="bf16")

    def hand_over(chunks: int) -> None:
        tokens = chunks * 64
        sender = HandoffSender(geometry, tokens, 0, 1, 0)
        receiver = HandoffReceiver(geometry, tokens)
        receiver.reserved(1, 0, 0)
        receiver.accepted(resumed=False, now_ns=0)
        for chunk in range(chunks):
            for number in range(8):
                event = Published(
                    request_id="r",
                    layer_begin=number,
                    layer_count=1,
                    block_begin=4 * chunk,
                    block_count=4,
                    valid_tokens=64,
                )
                kv_slice = KvSlice(number, 1, 0, 2, 4 * chunk, 4, 64)
                if side == "sender":
                    sender.published(event)
                    assert sender.may_read(kv_slice)
                else:
                    receiver.published(kv_slice, 0)

    small, large = (python_calls(lambda n=n: hand_over(n)) for n in (20, 80))
    assert large < 4.5 * small


def test_progress_forgives_the_streams_that_broke_before_it() -> None:
    """A long prompt that lost its stream three times in minutes lost its peer, too."""
    machine, asked = pulling(window_frames=1)
    for number in range(1, 4):
        asked += asked_of(machine.published(layer(number), 0))
    for _ in range(4):
        machine.stream_lost(peer_gone=False, reason="cut")
        assert machine.state is ReceiverState.OPENING
        asked += asked_of(machine.accepted(resumed=True, now_ns=0))
        piece = asked.pop(0)
        assert machine.frame_arrived(piece, machine.epoch)
        asked += asked_of(machine.frame_stored(piece, machine.epoch, 0))


def test_a_stream_that_breaks_again_without_progress_costs_the_peer() -> None:
    machine, _ = pulling()
    for _ in range(MAX_REOPENS):
        assert not any(
            isinstance(action, AskForPeer)
            for action in machine.stream_lost(peer_gone=False, reason="cut")
        )
        machine.accepted(resumed=True, now_ns=0)
    (_, ask) = machine.stream_lost(peer_gone=False, reason="cut")
    assert ask == AskForPeer("cut", peer_died=False)


def loading() -> HandoffReceiver:
    """A receiver whose engine loads the KV by itself."""
    machine = HandoffReceiver(GEOMETRY, 40)
    machine.reserved(1, 0, 0)
    machine.accepted(resumed=False, now_ns=0)
    assert machine.handed_over() == [LoadKv(1)]
    return machine


def test_what_the_engine_loads_by_itself_is_complete_without_a_pull() -> None:
    machine = loading()
    assert machine.commit_record(0, 0, 40, 0) == []  # it is about Baton's own transfers
    assert machine.tick(1 << 60) == []  # the engine's queue may be long
    assert machine.loaded(2) == []
    assert machine.loaded(1) == [KvLoaded(), CloseStream(release=True)]
    assert machine.state is ReceiverState.COMMITTED
    assert machine.load_failed(1, "late") == []


@pytest.mark.parametrize("gone", [False, True])
def test_a_load_that_fails_asks_for_another_peer(gone: bool) -> None:
    machine = loading()
    assert machine.stream_lost(gone, "refused") == []  # the engine may have all of it
    close, ask = machine.load_failed(1, "no KV")
    assert close == CloseStream(release=False)
    assert ask == AskForPeer("no KV", peer_died=gone)
    assert machine.replaced(1) == [OpenStream(1, 0)]
    machine.accepted(resumed=False, now_ns=2)
    assert machine.handed_over() == [LoadKv(1)]


def test_a_cancelled_load_notifies_the_peer() -> None:
    machine = loading()
    assert machine.cancel() == [CloseStream(release=False)]
    assert machine.loaded(1) == []
    assert machine.handed_over() == []
