"""A hand-off hears the end of each task that it began, whatever that end is."""

import asyncio
import math
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

from batonpb import decode_pb2 as pb
from batonpb.common_pb2 import PLAIN, WorkerIdentity
from batonpb.prefill_pb2 import PrefillAccepted, PrefillEvent, Published, Renew

from baton.types import events as ev
from baton.types.geometry import KvGeometry
from baton.wire.tokens import pack_tokens
from decode_worker.handoff import ReceivedHandoff
from decode_worker.pacing import ReceivePacer
from kvtransfer.edge import Edge
from kvtransfer.kv_slice import FRAME_BYTES
from kvtransfer.transport import TransportError

GEOMETRY = KvGeometry(num_layers=4, num_kv_heads=2, head_dim=8, num_blocks=64, dtype="bf16")


def handoff_with(
    peers: object, failures: list[str], pacer: ReceivePacer | None = None
) -> tuple[ReceivedHandoff, Mock]:
    parts = SimpleNamespace(
        engine=Mock(),
        pool=SimpleNamespace(geometry=GEOMETRY, parts=(), elsewhere=lambda _: ()),
        peers=peers,
        identity=WorkerIdentity(),
        metrics=Mock(),
        count_task_failure=failures.append,
        pacer=pacer or ReceivePacer(0.0),
    )
    submission = pb.Submission(request_id="a", prompt_tokens=pack_tokens(range(40)))
    submission.sampling.max_tokens = 8
    listener = Mock()
    handoff = ReceivedHandoff(submission, "d/a/1", parts, listener)
    handoff.on_report(ev.Reserved("d/a/1", generation=1, skip_blocks=0))
    return handoff, listener


def peers_that(pull: Exception, frame_bytes: int = FRAME_BYTES) -> Mock:
    """Peers of whom nobody answers, and every pull ends so."""

    async def greet(*_: object, **__: object) -> None:
        await asyncio.sleep(60)

    peers = Mock(greet=greet)
    peers.ways.return_value = ["grpc"]
    peers.address.return_value = ""
    peers.encoding.return_value = PLAIN
    peers.edge.return_value = Edge()
    peers.frame_bytes.return_value = frame_bytes
    peers.pull.side_effect = pull
    return peers


async def test_pulls_that_raise_are_failed_pulls() -> None:
    """They hung until the watchdog for stalls, and nobody counted them."""
    failures: list[str] = []

    peers = peers_that(RuntimeError("by design"))
    handoff, listener = handoff_with(peers, failures)
    handoff.on_event(PrefillEvent(accepted=PrefillAccepted()))
    published = Published(layer_count=4, block_begin=0, block_count=3, valid_tokens=40)
    handoff.on_event(PrefillEvent(published=published))
    handoff.on_report(ev.Bound("d/a/1", generation=1, blocks=(5, 6, 7)))
    for number in range(1, 5):
        await asyncio.sleep(0.01)
        assert failures == ["pull"] * number
        listener.on_peer_needed.assert_not_called()
        handoff.on_event(PrefillEvent(heartbeat=Renew()))  # the peer lives: try again
    reason = "a pull failed: RuntimeError: by design"
    listener.on_peer_needed.assert_called_once()
    target, error, died = listener.on_peer_needed.call_args.args
    assert (target, error.message, died) == (handoff._target, reason, False)
    await handoff._tasks.close()


async def test_words_that_cannot_be_handled_give_the_peer_up(monkeypatch) -> None:
    failures: list[str] = []
    word = PrefillEvent(published=Published(layer_count=4, block_count=3, valid_tokens=40))

    async def read() -> PrefillEvent:
        await asyncio.sleep(0.001)
        return word

    call = Mock(write=AsyncMock(), read=read, done_writing=AsyncMock())
    peers = Mock(greet=AsyncMock(), prefill=Mock(return_value=call))
    handoff, listener = handoff_with(peers, failures)
    broken = Mock(from_published=Mock(side_effect=RuntimeError("by design")))
    monkeypatch.setattr("decode_worker.handoff.KvSlice", broken)
    await asyncio.sleep(0.1)
    assert failures == ["prefill stream"]
    reason = f"{handoff._target.worker_id}: RuntimeError: by design"
    listener.on_peer_needed.assert_called_once()
    target, error, died = listener.on_peer_needed.call_args.args
    assert (target, error.message, died) == (handoff._target, reason, False)
    assert len(handoff._tasks) == 0, "the renewals ended with it"


def one_frame_at_a_time() -> ReceivePacer:
    """A worker whose streams leave nothing for a second frame."""
    pacer = ReceivePacer(1e-9)
    pacer.after_step(ev.StepDone(answering=1))
    return pacer


def begin_pulling(handoff: ReceivedHandoff) -> None:
    """All is published, in several frames."""
    handoff.on_event(PrefillEvent(accepted=PrefillAccepted()))
    published = Published(layer_count=4, block_begin=0, block_count=3, valid_tokens=40)
    handoff.on_event(PrefillEvent(published=published))
    handoff.on_report(ev.Bound("d/a/1", generation=1, blocks=(5, 6, 7)))


async def test_frames_behind_one_that_did_not_come_are_not_waited_for() -> None:
    peers = peers_that(TransportError("gone"), frame_bytes=1 << 12)
    handoff, listener = handoff_with(peers, [], one_frame_at_a_time())
    begin_pulling(handoff)
    assert len(handoff._machine._asked) > 1
    await asyncio.sleep(0.01)
    assert peers.pull.call_count == 1
    assert not handoff._machine._asked, "they are pulled again when the peer is known to live"
    assert handoff.credit_wait_s < 1
    handoff.cancel()
    listener.on_drained.assert_called_once()


async def test_a_hand_off_that_is_cancelled_waits_for_no_credit() -> None:
    pacer = one_frame_at_a_time()
    await pacer.take("another", "peer", [1 << 20])
    peers = peers_that(TransportError("gone"), frame_bytes=1 << 12)
    handoff, listener = handoff_with(peers, [], pacer)
    begin_pulling(handoff)
    await asyncio.sleep(0.01)
    assert math.isinf(handoff.credit_wait_s)
    handoff.tick(time.monotonic_ns() + 60 * 10**9)
    listener.on_peer_needed.assert_not_called()
    handoff.cancel()
    listener.on_drained.assert_called_once()
    await asyncio.sleep(0.01)
    assert handoff.credit_wait_s < 1
    peers.pull.assert_not_called()
