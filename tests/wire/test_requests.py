"""Requests on their way from the router to the engines of both workers."""

import msgspec
from batonpb import common_pb2
from batonpb.common_pb2 import WorkerIdentity
from batonpb.decode_pb2 import PrefillTarget, Submission

from baton.engine.core.block_owners import CacheOwner
from baton.engine.core.pinned_blocks import Retention
from baton.engine.core.sequence import Kind, RequestSpec
from baton.types.params import SamplingParams
from baton.wire.codecs import sampling_to_wire
from baton.wire.submission import prefill_start, submit_from_wire


def test_tenant_and_share_of_the_cache_reach_both_engines() -> None:
    sampling = sampling_to_wire(SamplingParams(max_tokens=1))
    hint = common_pb2.Retention(keep_s=60, share=0.5)
    sent = Submission(
        request_id="r", sampling=sampling, tenant="team", kv_share=0.25, retention=hint
    )
    received = Submission.FromString(sent.SerializeToString())
    owner = CacheOwner("team", 0.25)
    assert submit_from_wire(received, "r", Kind.REMOTE).spec.cache_owner == owner
    start = prefill_start(received, PrefillTarget(), WorkerIdentity(), generation=1, skip_blocks=0)
    assert submit_from_wire(start, "r", Kind.PREFILL).spec.cache_owner == owner
    for message in received, start:
        spec = msgspec.msgpack.decode(
            msgspec.msgpack.encode(submit_from_wire(message, "r", Kind.FULL).spec), type=RequestSpec
        )
        assert spec.retention == Retention(60, 0.5)


def test_a_message_of_an_older_router_has_no_share() -> None:
    old = Submission(
        request_id="r", sampling=sampling_to_wire(SamplingParams(max_tokens=1)), tenant="team"
    )
    spec = submit_from_wire(old, "r", Kind.FULL).spec
    assert (spec.cache_owner, spec.retention) == (CacheOwner("team", 0.0), None)
