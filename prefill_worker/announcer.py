"""Performs the actions of a hand-off's machine: events to decode, commands to the engine."""

from collections.abc import Iterable

from batonpb import prefill_pb2 as pb

from baton.engine.process import messages
from baton.engine.process.handle import EngineHandle
from baton.telemetry.metrics import Metrics
from baton.wire.codecs import first_tokens_to_wire
from kvtransfer import sender
from kvtransfer.rank_pools import RankPools
from prefill_worker.handoff import SentHandoff


class Announcer:
    """Announces KV, first tokens and the commit record, and releases blocks."""

    def __init__(self, engine: EngineHandle, pool: RankPools, metrics: Metrics) -> None:
        self._engine = engine
        self._heads = pool.geometry.num_kv_heads
        self._metrics = metrics

    def perform(self, handoff: SentHandoff, actions: Iterable[sender.Action]) -> None:
        """Perform the actions of a hand-off's machine, in order."""
        for action in actions:
            match action:
                case sender.Announce():
                    published = action.kv_slice.to_published(self._heads)
                    handoff.events.put_nowait(pb.PrefillEvent(published=published))
                case sender.AnnounceFirst():
                    for message in first_tokens_to_wire(action.done, handoff.prompt_outputs):
                        handoff.events.put_nowait(pb.PrefillEvent(first_tokens=message))
                case sender.AnnounceCommit():
                    record = pb.CommitRecord(
                        rectangles=action.rectangles,
                        payload_bytes=action.payload_bytes,
                        valid_tokens=action.valid_tokens,
                        manifest_digest=action.manifest,
                    )
                    handoff.events.put_nowait(pb.PrefillEvent(commit=record))
                case sender.GiveBack():
                    self._give_back(handoff, action)

    def _give_back(self, handoff: SentHandoff, action: sender.GiveBack) -> None:
        if action.overdue:
            self._metrics.inc("baton_loans_overdue", action.overdue)
        if handoff.prefix is not None:
            handoff.prefix.stop()
        elif action.cancel:
            self._engine.client.send(messages.Cancel(handoff.engine_id))
        else:
            self._engine.client.send(messages.Release(handoff.engine_id))
