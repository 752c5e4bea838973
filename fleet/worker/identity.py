"""Descriptions of a worker for its peers, for routers and for the registry."""

import secrets
import socket
from collections.abc import Sequence

from batonpb import common_pb2

from baton.engine.process.messages import Ready
from baton.registry.types import WorkerRecord
from baton.telemetry.version import version
from baton.wire.compatibility import kv_group, own_wire
from fleet.worker.settings import WorkerSettings
from kvtransfer.int8_chunks import ENCODES
from kvtransfer.transport import TransportServer


def identity_of(settings: WorkerSettings, ready: Ready, address: str) -> common_pb2.WorkerIdentity:
    """Return the identity of a new incarnation."""
    return common_pb2.WorkerIdentity(
        worker_id=settings.worker_id,
        incarnation=secrets.token_bytes(16),
        epoch=settings.epoch,
        role=settings.role,
        host=settings.label or socket.gethostname(),
        address=address,
        pid=ready.pid,
    )


def capabilities_of(
    settings: WorkerSettings, ready: Ready, senders: Sequence[TransportServer]
) -> common_pb2.Capabilities:
    """Return the capabilities that peers and routers need."""
    int8 = (
        settings.int8_chunks
        and settings.engine.numerics == "fast"
        and ready.geometry.dtype == ENCODES
        and not ready.hand_off  # the order of bytes in its blocks is the engine's own
    )
    return common_pb2.Capabilities(
        images=True,
        wire=own_wire(),
        kv_groups=[kv_group(ready.geometry)],
        numerics_id=ready.numerics_id,
        weights_digest=ready.weights_digest,
        model=settings.served_model_name,
        max_context_tokens=ready.max_context_tokens,
        transports=[sender.offer for sender in senders if sender.offer is not None],
        encodings=[common_pb2.INT8] if int8 else [],
        hand_off=ready.hand_off,
    )


def record_of(
    settings: WorkerSettings,
    identity: common_pb2.WorkerIdentity,
    ready: Ready,
    metrics_address: str,
) -> WorkerRecord:
    """Return the worker's record in the registry."""
    return WorkerRecord(
        worker_id=settings.worker_id,
        role=settings.role,
        state="ready",
        epoch=settings.epoch,
        turn=settings.turn,
        incarnation=identity.incarnation,
        pid=ready.pid,
        host=identity.host,
        address=identity.address,
        metrics_address=metrics_address,
        threads=ready.threads,
        ranks=ready.ranks,
        version=version(),
        kv_blocks=ready.geometry.num_blocks,
        server=settings.server,
        unseen_block_tokens=settings.unseen_block_tokens,
    )
