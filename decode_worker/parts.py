"""What every request of a decode worker shares."""

from batonpb import common_pb2

from baton.engine.process.handle import EngineHandle
from baton.telemetry.metrics import Metrics
from baton.telemetry.tracing import Tracing
from decode_worker.pacing import ReceivePacer
from decode_worker.peers import Peers
from kvtransfer.ranks.pools import KvPools


class WorkerParts:
    """One engine and what stands around it.

    Args:
        engine: The engine.
        pool: Its KV pool, or those of its ranks.
        peers: Connections to prefill workers.
        identity: Of this worker.
        eos_token_ids: Of the model.
        metrics: Of this worker.
        tracing: Of this worker.
        pacer: Of all KV that this worker receives.
    """

    def __init__(
        self,
        engine: EngineHandle,
        pool: KvPools,
        peers: Peers,
        identity: common_pb2.WorkerIdentity,
        eos_token_ids: tuple[int, ...],
        metrics: Metrics,
        tracing: Tracing,
        pacer: ReceivePacer,
    ) -> None:
        self.engine = engine
        self.pool = pool
        self.peers = peers
        self.identity = identity
        self.eos_token_ids = frozenset(eos_token_ids)
        self.metrics = metrics
        self.tracing = tracing
        self.pacer = pacer
        self.transfers = common_pb2.TransferTotals()

    def count_task_failure(self, task: str) -> None:
        """For ``BackgroundTasks``."""
        self.metrics.inc("baton_task_failures", task=task)
