"""Conversions of a request: router to decode worker, decode to prefill worker, worker to engine.

``Submission`` and ``PrefillStart`` use the same names for the same fields. A new field of a request
is added to both messages and here.
"""

from batonpb import common_pb2
from batonpb.common_pb2 import WorkerIdentity
from batonpb.decode_pb2 import Image, PrefillReplacement, PrefillTarget, Submission
from batonpb.prefill_pb2 import PrefillStart

from baton.engine.core.pinned_blocks import Retention
from baton.engine.core.sequence import Kind, RequestSpec
from baton.engine.process.messages import Submit
from baton.types.block_hashes import HASH_BYTES
from baton.types.errors import InvalidRequestError
from baton.types.geometry import TOKEN_BYTES
from baton.types.images import PromptImage
from baton.wire.codecs import adapter_from_wire, sampling_from_wire
from baton.wire.tokens import unpack_tokens

_MOST_CHOICES = 1024  # routers accept 128
_MOST_LOGPROBS = 1024  # routers accept 20
_MOST_LEASE_MS = 600_000  # routers ask for 3 s
_SAME = (
    *("request_id", "attempt", "ticket", "priority", "prompt_tokens", "sampling", "tenant"),
    *("hash_seed", "deadline_remaining_ns", "traceparent", "tracestate", "baggage", "lease_ms"),
    *("probe", "router_id", "pooling", "prefix_then", "kv_share"),
)


def check_submission(message: Submission | PrefillStart) -> None:
    """Raise `InvalidRequestError` for a message that would end a worker or fill its memory."""
    sampling = message.sampling
    emitted = [choice.token_ids for choice in getattr(message, "emitted", ())]
    shares = (message.kv_share, message.retention.share)
    problems = {
        f"the hash seed must have {HASH_BYTES} bytes": len(message.hash_seed) != HASH_BYTES,
        f"n must be 1 to {_MOST_CHOICES}": not 1 <= sampling.n <= _MOST_CHOICES,
        f"logprobs must be at most {_MOST_LOGPROBS}": sampling.logprobs > _MOST_LOGPROBS,
        f"prompt_logprobs must be 0 to {_MOST_LOGPROBS}": (
            not 0 <= sampling.prompt_logprobs <= _MOST_LOGPROBS + 1
        ),
        "shares of the cache must be 0 to 1": not all(0 <= share <= 1 for share in shares),
        f"lease_ms must be at most {_MOST_LEASE_MS}": message.lease_ms > _MOST_LEASE_MS,
        "tokens must be uint32": any(
            len(packed) % TOKEN_BYTES
            for packed in (message.prompt_tokens, *sampling.bad_words, *emitted)
        ),
    }
    for problem, is_so in problems.items():
        if is_so:
            raise InvalidRequestError(problem)


def replace_prefix(submission: Submission, replacement: PrefillReplacement) -> None:
    """Replace the prefix sources, whose capabilities are valid for one reader only."""
    submission.ClearField("prefix")
    submission.ClearField("prefix_then")
    if replacement.HasField("prefix"):
        submission.prefix.CopyFrom(replacement.prefix)
        submission.prefix_then.extend(replacement.prefix_then)


def prefill_start(
    submission: Submission,
    target: PrefillTarget,
    sender: WorkerIdentity,
    *,
    generation: int,
    skip_blocks: int,
) -> PrefillStart:
    """Build the first message of decode worker ``sender`` to prefill worker ``target``.

    The reservation has the ``generation``. Decode already has ``skip_blocks`` leading blocks.
    """
    same = {name: getattr(submission, name) for name in _SAME}
    return PrefillStart(
        **same,
        skip_blocks=skip_blocks,
        expected_incarnation=target.incarnation,
        decode_incarnation=sender.incarnation,
        decode_worker_id=sender.worker_id,
        generation=generation,
        adapter=submission.adapter if submission.HasField("adapter") else None,
        prefix=submission.prefix if submission.HasField("prefix") else None,
        held_only=target.held_only,
        retention=submission.retention if submission.HasField("retention") else None,
    )


def prefix_request_id(request_id: str, link: int = 0) -> str:
    """Return the id of the hand-off that pulls leading blocks of a request from another worker.

    ``link`` counts earlier pulls for the same request.
    """
    return f"prefix{link or ''}/{request_id}"


def emitted_from_wire(submission: Submission) -> tuple[tuple[int, ...] | None, ...]:
    """Return per choice the tokens to resume after, None if it has ended; () for a new response."""
    return tuple(
        None if choice.finish_reason else tuple(unpack_tokens(choice.token_ids))
        for choice in submission.emitted
    )


def _retention(message: common_pb2.Retention) -> Retention:
    return Retention(message.keep_s, message.share)


def _image(message: Image) -> PromptImage:
    placeholder = tuple(message.placeholder)
    return PromptImage(message.data, message.digest, message.begin, message.count, placeholder)


def submit_from_wire(
    message: Submission | PrefillStart, engine_id: str, kind: Kind, skip_blocks: int = 0
) -> Submit:
    """Build the engine's submit command. KV of the first ``skip_blocks`` blocks is not needed."""
    spec = RequestSpec(
        kind=kind,
        params=sampling_from_wire(message.sampling),
        hash_seed=message.hash_seed,
        priority=message.priority,
        ticket=message.ticket,
        skip_blocks=skip_blocks,
        cacheable=not message.probe,
        adapter=adapter_from_wire(message.adapter),
        pooling=message.pooling,
        emitted=emitted_from_wire(message) if isinstance(message, Submission) else (),
        tenant=message.tenant,
        kv_share=message.kv_share,
        retention=_retention(message.retention) if message.HasField("retention") else None,
        images=tuple(map(_image, getattr(message, "images", ()))),
    )
    return Submit(request_id=engine_id, prompt_token_ids=message.prompt_tokens, spec=spec)
