"""Bytes that processes of two versions exchange, or that Redis keeps, do not change by accident.

Recorded from commit 8dfb768, with fields added to a worker's record since (``turn``, ``intent``,
``version``, ``kv_blocks``, ``server``, ``unseen_block_tokens``), which earlier versions ignore, and
without ``rank_hosts``, which they do not need. A change here needs a new wire version, and a look
at ``tests/fleet/test_upgrade.py``.
"""

from hashlib import sha256

import msgspec
import pytest
from batonpb import prefill_pb2 as pb

from baton.registry.types import EventBatch, Heartbeat, Snapshot, WorkerRecord
from baton.types.block_hashes import block_hashes, hash_seed
from baton.types.errors import DeadlineError
from baton.types.events import PromptDone, PromptOutputsReady
from baton.types.geometry import KvGeometry
from baton.types.params import SampledToken, SamplingParams
from baton.wire.capability import sign
from baton.wire.codecs import error_to_wire, first_tokens_to_wire, sampling_to_wire
from baton.wire.fleet_token import FleetToken
from kvtransfer.chunk import binding, digests, encode, manifest_digest
from kvtransfer.kv_slice import KvSlice

LIFE = bytes(range(16))
SLICE = KvSlice(2, 3, 0, 2, 5, 2, 20)
GEOMETRY = KvGeometry(num_layers=6, num_kv_heads=2, head_dim=4, num_blocks=8, dtype="bf16")
PARAMS = SamplingParams(
    max_tokens=77, temperature=0.7, top_p=0.9, top_k=11, min_p=0.05, seed=42, n=3
)
WORKER = WorkerRecord(
    worker_id="decode-0",
    role="decode",
    state="ready",
    epoch=3,
    incarnation=LIFE,
    pid=7,
    host="a",
    address="a:1",
    metrics_address="a:2",
    threads=2,
    ranks=(7, 8),
)


def _chunk() -> bytes:
    payload = bytes(i % 251 for i in range(SLICE.payload_bytes(GEOMETRY)))
    bound = binding("req-1", 2, 3, LIFE)
    header = pb.ChunkHeader(
        payload_bytes=len(payload), digests=digests(payload, SLICE, GEOMETRY, bound)
    )
    return encode(header, payload)


def _first_tokens(engine_transfer: bytes = b"") -> bytes:
    done = PromptDone(
        request_id="r",
        first=(SampledToken(5, -0.5, ((5, -0.5), (6, -1.5))),),
        cached_tokens=3,
        queue_ns=4,
        prefill_ns=5,
        computed_ns=6,
        engine_transfer=engine_transfer,
    )
    (message,) = first_tokens_to_wire(done, PromptOutputsReady("r"))
    return message.SerializeToString(deterministic=True)


BYTES = {
    "sampling": (
        lambda: sampling_to_wire(PARAMS).SerializeToString(deterministic=True),
        "0a3d420fe7fd6522ebeda886",
    ),
    "error": (
        lambda: error_to_wire(DeadlineError("late", param="p")).SerializeToString(),
        "297fb78ff41bcc8005b00ce5",
    ),
    "first tokens": (_first_tokens, "82a2ba5d016996c6809c1cfb"),
    "first tokens of an engine": (lambda: _first_tokens(b"[{}]"), "e0feb40361ee50fecba5fff2"),
    "block hashes": (
        lambda: b"".join(block_hashes(hash_seed(b"w", "f", "n"), range(50))),
        "bceec4218ac7eac558070387",
    ),
    "capability": (
        lambda: sign(FleetToken("secret"), "req-1", LIFE, LIFE, 1000.0),
        "a4183210bc090e63641f1f5a",
    ),
    "chunk": (_chunk, "cb5660c0d4b82f091c251728"),
    "manifest": (
        lambda: manifest_digest([SLICE]).to_bytes(8, "little"),
        "b21ea951305be554eaf71395",
    ),
    "worker": (lambda: msgspec.msgpack.encode(WORKER), "edc2e37daf4f9e41dcdcd18b"),
    "batch": (
        lambda: msgspec.msgpack.encode(EventBatch(incarnation=LIFE, sequence=4, stored=(LIFE,))),
        "f6c397875381e0d130b075c5",
    ),
    "snapshot": (
        lambda: msgspec.msgpack.encode(Snapshot(incarnation=LIFE, sequence=4, packed=LIFE)),
        "76ab0822a3ea455f20ca6fbe",
    ),
    "heartbeat": (
        lambda: msgspec.msgpack.encode(Heartbeat(incarnation=LIFE, sequence=4, checksum=9)),
        "1a213418bcb9de4e670d101b",
    ),
}


def test_a_worker_of_an_earlier_version_reads_first_tokens_without_the_transfer() -> None:
    """Such a worker does not pair with one whose engine moves KV by itself."""
    plain = _first_tokens()
    assert pb.FirstTokens.FromString(plain).engine_transfer == b""
    assert _first_tokens(b"[{}]").startswith(plain)  # the field is the last one


@pytest.mark.parametrize("name", BYTES)
def test_bytes_are_those_of_the_recorded_version(name: str) -> None:
    make, recorded = BYTES[name]
    assert sha256(make()).hexdigest()[:24] == recorded
