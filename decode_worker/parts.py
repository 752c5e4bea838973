"""Parts of a decode worker that all its requests share."""

from dataclasses import dataclass, field

from batonpb import common_pb2

from baton.engine.process.handle import EngineHandle
from baton.telemetry.metrics import Metrics
from baton.telemetry.tracing import Tracing
from decode_worker.pacing import ReceivePacer
from decode_worker.peers import Peers
from kvtransfer.rank_pools import RankPools


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """Engine of a worker, and the parts around it."""

    engine: EngineHandle
    pool: RankPools
    peers: Peers
    identity: common_pb2.WorkerIdentity
    eos_token_ids: tuple[int, ...]
    metrics: Metrics
    tracing: Tracing
    pacer: ReceivePacer
    transfers: common_pb2.TransferTotals = field(default_factory=common_pb2.TransferTotals)

    def count_task_failure(self, task: str) -> None:
        """Count a failed background task."""
        self.metrics.inc("baton_task_failures", task=task)
