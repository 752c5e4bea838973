"""A hand-off hears the end of each task that it began, whatever that end is."""

import asyncio
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

from batonpb import decode_pb2 as pb
from batonpb.common_pb2 import PLAIN, WorkerIdentity
from batonpb.prefill_pb2 import PrefillAccepted, PrefillEvent, Published, Renew

from decode_worker.handoff import Handoff
from decode_worker.pacing import ReceivePacer
from engine.core import events as ev
from engine.core.geometry import KvGeometry
from kvtransfer.edge import Edge
from kvtransfer.kv_slice import FRAME_BYTES
from wire.tokens import pack_tokens

GEOMETRY = KvGeometry(num_layers=4, num_kv_heads=2, head_dim=8, num_blocks=64, dtype="bf16")


def handoff_with(peers: object, failures: list[str]) -> tuple[Handoff, Mock]:
    parts = SimpleNamespace(
        engine=Mock(),
        pool=SimpleNamespace(geometry=GEOMETRY, parts=(), elsewhere=lambda _: ()),
        peers=peers,
        identity=WorkerIdentity(),
        metrics=Mock(),
        count_task_failure=failures.append,
        pacer=ReceivePacer(0.0),
    )
    submission = pb.Submission(request_id="a", prompt_tokens=pack_tokens(range(40)))
    submission.sampling.max_tokens = 8
    listener = Mock()
    handoff = Handoff(submission, "d/a/1", parts, listener)
    handoff.on_report(ev.Reserved("d/a/1", generation=1, skip_blocks=0))
    return handoff, listener


async def test_pulls_that_raise_are_failed_pulls() -> None:
    """They hung until the watchdog for stalls, and nobody counted them."""
    failures: list[str] = []

    async def greet(*_: object, **__: object) -> None:
        await asyncio.sleep(60)

    peers = Mock(greet=greet)
    peers.ways.return_value = ["grpc"]
    peers.address.return_value = ""
    peers.encoding.return_value = PLAIN
    peers.edge.return_value = Edge()
    peers.frame_bytes.return_value = FRAME_BYTES
    peers.pull.side_effect = RuntimeError("by design")
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
    reason = "a pull broke: RuntimeError: by design"
    listener.on_peer_needed.assert_called_once_with(handoff._target, reason, False)
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
    listener.on_peer_needed.assert_called_once_with(handoff._target, reason, False)
    assert len(handoff._tasks) == 0, "the renewals ended with it"
