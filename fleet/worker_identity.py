"""What a worker says of itself: to its peers, to routers, in the registry."""

import secrets
import socket
from collections.abc import Sequence

from batonpb import common_pb2

from baton.engine.process.messages import Ready
from baton.registry.types import WorkerRecord
from baton.wire.compatibility import kv_group, own_wire
from fleet.worker_settings import WorkerSettings
from kvtransfer.int8_chunks import ENCODES
from kvtransfer.ranks.link import RankLink
from kvtransfer.ranks.pools import RankPools
from kvtransfer.transport import TransportServer


def identity_of(settings: WorkerSettings, ready: Ready, address: str) -> common_pb2.WorkerIdentity:
    """Who it is, in this life."""
    return common_pb2.WorkerIdentity(
        worker_id=settings.worker_id,
        incarnation=secrets.token_bytes(16),
        epoch=settings.epoch,
        role=settings.role,
        host=socket.gethostname(),
        address=address,
        pid=ready.pid,
    )


def capabilities_of(
    settings: WorkerSettings, ready: Ready, senders: Sequence[TransportServer], pool: RankPools
) -> common_pb2.Capabilities:
    """What its peers must know to work with it."""
    int8 = (
        settings.int8_chunks
        and settings.engine.numerics == "fast"
        and ready.geometry.dtype == ENCODES
        and not pool.links  # ranks elsewhere send and take what is in their pools
    )
    return common_pb2.Capabilities(
        wire=own_wire(),
        kv_groups=[kv_group(ready.geometry)],
        numerics_id=ready.numerics_id,
        weights_digest=ready.weights_digest,
        model=settings.served_model_name,
        max_context_tokens=ready.max_context_tokens,
        transports=[sender.offer for sender in senders if sender.offer is not None],
        rank_heads=[
            common_pb2.HeadRange(head_begin=heads.start, head_count=len(heads), address=address)
            for heads, address in pool.served_elsewhere
        ],
        encodings=[common_pb2.INT8] if int8 else [],
    )


def record_of(
    settings: WorkerSettings,
    identity: common_pb2.WorkerIdentity,
    ready: Ready,
    links: Sequence[RankLink],
    metrics_address: str,
) -> WorkerRecord:
    """What it says of itself in the registry."""
    here = ready.ranks or (ready.pid,)
    return WorkerRecord(
        worker_id=settings.worker_id,
        role=settings.role,
        state="ready",
        epoch=settings.epoch,
        incarnation=identity.incarnation,
        pid=ready.pid,
        host=identity.host,
        address=identity.address,
        metrics_address=metrics_address,
        threads=ready.threads,
        ranks=(*here, *(link.pid for link in links)) if links else ready.ranks,
        rank_hosts=(identity.host, *(link.host for link in links)) if links else (),
    )
