from batonpb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ImageQuestion(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ImageTokens(_message.Message):
    __slots__ = ("prompt_tokens", "begin", "count", "error")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: bytes
    begin: int
    count: int
    error: _common_pb2.Error
    def __init__(self, prompt_tokens: _Optional[bytes] = ..., begin: _Optional[int] = ..., count: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("data", "digest", "begin", "count", "placeholder")
    DATA_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PLACEHOLDER_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    digest: bytes
    begin: int
    count: int
    placeholder: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, data: _Optional[bytes] = ..., digest: _Optional[bytes] = ..., begin: _Optional[int] = ..., count: _Optional[int] = ..., placeholder: _Optional[_Iterable[int]] = ...) -> None: ...

class RouterFrame(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "heartbeat", "resume", "replacement", "drain", "frames")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    REPLACEMENT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submission
    cancel: Cancel
    heartbeat: Heartbeat
    resume: Resume
    replacement: PrefillReplacement
    drain: Drain
    frames: _containers.RepeatedCompositeFieldContainer[RouterFrame]
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submission, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., replacement: _Optional[_Union[PrefillReplacement, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., frames: _Optional[_Iterable[_Union[RouterFrame, _Mapping]]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_id", "router_incarnation", "wire", "may_rest")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WIRE_FIELD_NUMBER: _ClassVar[int]
    MAY_REST_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    router_incarnation: bytes
    wire: _common_pb2.WireRange
    may_rest: bool
    def __init__(self, router_id: _Optional[str] = ..., router_incarnation: _Optional[bytes] = ..., wire: _Optional[_Union[_common_pb2.WireRange, _Mapping]] = ..., may_rest: _Optional[bool] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class PrefillTarget(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address", "transport", "held_only", "capability")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    HELD_ONLY_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: bytes
    address: str
    transport: str
    held_only: bool
    capability: bytes
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., address: _Optional[str] = ..., transport: _Optional[str] = ..., held_only: _Optional[bool] = ..., capability: _Optional[bytes] = ...) -> None: ...

class Submission(_message.Message):
    __slots__ = ("request_id", "attempt", "ticket", "priority", "prompt_tokens", "sampling", "tenant", "hash_seed", "deadline_remaining_ns", "prefill", "traceparent", "tracestate", "baggage", "router_id", "lease_ms", "probe", "adapter", "pooling", "prefix", "prefix_then", "kv_share", "retention", "images", "emitted")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_REMAINING_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    BAGGAGE_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    PREFIX_THEN_FIELD_NUMBER: _ClassVar[int]
    KV_SHARE_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    EMITTED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    ticket: int
    priority: int
    prompt_tokens: bytes
    sampling: _common_pb2.SamplingParams
    tenant: str
    hash_seed: bytes
    deadline_remaining_ns: int
    prefill: PrefillTarget
    traceparent: str
    tracestate: str
    baggage: str
    router_id: str
    lease_ms: int
    probe: bool
    adapter: _common_pb2.Adapter
    pooling: str
    prefix: _common_pb2.PrefixSource
    prefix_then: _containers.RepeatedCompositeFieldContainer[_common_pb2.PrefixSource]
    kv_share: float
    retention: _common_pb2.Retention
    images: _containers.RepeatedCompositeFieldContainer[Image]
    emitted: _containers.RepeatedCompositeFieldContainer[Emitted]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., ticket: _Optional[int] = ..., priority: _Optional[int] = ..., prompt_tokens: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., tenant: _Optional[str] = ..., hash_seed: _Optional[bytes] = ..., deadline_remaining_ns: _Optional[int] = ..., prefill: _Optional[_Union[PrefillTarget, _Mapping]] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., baggage: _Optional[str] = ..., router_id: _Optional[str] = ..., lease_ms: _Optional[int] = ..., probe: _Optional[bool] = ..., adapter: _Optional[_Union[_common_pb2.Adapter, _Mapping]] = ..., pooling: _Optional[str] = ..., prefix: _Optional[_Union[_common_pb2.PrefixSource, _Mapping]] = ..., prefix_then: _Optional[_Iterable[_Union[_common_pb2.PrefixSource, _Mapping]]] = ..., kv_share: _Optional[float] = ..., retention: _Optional[_Union[_common_pb2.Retention, _Mapping]] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., emitted: _Optional[_Iterable[_Union[Emitted, _Mapping]]] = ...) -> None: ...

class Emitted(_message.Message):
    __slots__ = ("token_ids", "finish_reason")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    finish_reason: str
    def __init__(self, token_ids: _Optional[bytes] = ..., finish_reason: _Optional[str] = ...) -> None: ...

class SubmitAck(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "attempt", "choices")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choices: _Optional[_Iterable[int]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("request_id", "attempt", "next_index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    next_index: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., next_index: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefillReplacement(_message.Message):
    __slots__ = ("request_id", "attempt", "prefill", "compute_locally", "refuse", "prefix", "prefix_then")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_LOCALLY_FIELD_NUMBER: _ClassVar[int]
    REFUSE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    PREFIX_THEN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prefill: PrefillTarget
    compute_locally: bool
    refuse: _common_pb2.Error
    prefix: _common_pb2.PrefixSource
    prefix_then: _containers.RepeatedCompositeFieldContainer[_common_pb2.PrefixSource]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prefill: _Optional[_Union[PrefillTarget, _Mapping]] = ..., compute_locally: _Optional[bool] = ..., refuse: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., prefix: _Optional[_Union[_common_pb2.PrefixSource, _Mapping]] = ..., prefix_then: _Optional[_Iterable[_Union[_common_pb2.PrefixSource, _Mapping]]] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("on",)
    ON_FIELD_NUMBER: _ClassVar[int]
    on: bool
    def __init__(self, on: _Optional[bool] = ...) -> None: ...

class WorkerFrame(_message.Message):
    __slots__ = ("step", "tokens", "routes", "ends", "prefill_needed", "status", "transfers", "heard")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NEEDED_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    step: int
    tokens: _containers.RepeatedCompositeFieldContainer[TokenRun]
    routes: _containers.RepeatedCompositeFieldContainer[RequestRoute]
    ends: _containers.RepeatedCompositeFieldContainer[RequestEnd]
    prefill_needed: _containers.RepeatedCompositeFieldContainer[PrefillNeeded]
    status: _common_pb2.WorkerStatus
    transfers: _common_pb2.TransferTotals
    heard: int
    def __init__(self, step: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[TokenRun, _Mapping]]] = ..., routes: _Optional[_Iterable[_Union[RequestRoute, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[RequestEnd, _Mapping]]] = ..., prefill_needed: _Optional[_Iterable[_Union[PrefillNeeded, _Mapping]]] = ..., status: _Optional[_Union[_common_pb2.WorkerStatus, _Mapping]] = ..., transfers: _Optional[_Union[_common_pb2.TransferTotals, _Mapping]] = ..., heard: _Optional[int] = ...) -> None: ...

class TokenRun(_message.Message):
    __slots__ = ("request_id", "attempt", "choice", "index", "token_ids", "logprobs", "finish_reason", "stop_token_id", "has_stop_token", "prompt_logprobs", "embedding")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    HAS_STOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choice: int
    index: int
    token_ids: bytes
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprob]
    finish_reason: str
    stop_token_id: int
    has_stop_token: bool
    prompt_logprobs: _common_pb2.PromptLogprobs
    embedding: bytes
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ..., index: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., has_stop_token: _Optional[bool] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ..., embedding: _Optional[bytes] = ...) -> None: ...

class RequestRoute(_message.Message):
    __slots__ = ("request_id", "attempt", "prefill_worker_id", "decode_worker_id", "mode", "cached_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    prefill_worker_id: str
    decode_worker_id: str
    mode: str
    cached_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., prefill_worker_id: _Optional[str] = ..., decode_worker_id: _Optional[str] = ..., mode: _Optional[str] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class RequestEnd(_message.Message):
    __slots__ = ("request_id", "attempt", "error", "times")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    error: _common_pb2.Error
    times: RequestTimes
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., times: _Optional[_Union[RequestTimes, _Mapping]] = ...) -> None: ...

class RequestTimes(_message.Message):
    __slots__ = ("queue_ns", "prefill_ns", "transfer_ns", "decode_ns", "transfer_bytes", "preemptions", "cached_tokens", "computed_tokens", "repaired_chunks", "input_ns", "output_ns", "reserve_ns", "first_ns")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPAIRED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    INPUT_NS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_NS_FIELD_NUMBER: _ClassVar[int]
    RESERVE_NS_FIELD_NUMBER: _ClassVar[int]
    FIRST_NS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    prefill_ns: int
    transfer_ns: int
    decode_ns: int
    transfer_bytes: int
    preemptions: int
    cached_tokens: int
    computed_tokens: int
    repaired_chunks: int
    input_ns: int
    output_ns: int
    reserve_ns: int
    first_ns: int
    def __init__(self, queue_ns: _Optional[int] = ..., prefill_ns: _Optional[int] = ..., transfer_ns: _Optional[int] = ..., decode_ns: _Optional[int] = ..., transfer_bytes: _Optional[int] = ..., preemptions: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., repaired_chunks: _Optional[int] = ..., input_ns: _Optional[int] = ..., output_ns: _Optional[int] = ..., reserve_ns: _Optional[int] = ..., first_ns: _Optional[int] = ...) -> None: ...

class PrefillNeeded(_message.Message):
    __slots__ = ("request_id", "attempt", "failed", "reason", "peer_died")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PEER_DIED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    failed: PrefillTarget
    reason: _common_pb2.Error
    peer_died: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., failed: _Optional[_Union[PrefillTarget, _Mapping]] = ..., reason: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., peer_died: _Optional[bool] = ...) -> None: ...
