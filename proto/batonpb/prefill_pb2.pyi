from batonpb import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandshakeReply(_message.Message):
    __slots__ = ("identity", "capabilities", "refusal")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    identity: _common_pb2.WorkerIdentity
    capabilities: _common_pb2.Capabilities
    refusal: _common_pb2.Error
    def __init__(self, identity: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., capabilities: _Optional[_Union[_common_pb2.Capabilities, _Mapping]] = ..., refusal: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...

class PrefillControl(_message.Message):
    __slots__ = ("start", "renew", "cancel", "release")
    START_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    start: PrefillStart
    renew: Renew
    cancel: PrefillCancel
    release: Release
    def __init__(self, start: _Optional[_Union[PrefillStart, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., cancel: _Optional[_Union[PrefillCancel, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ...) -> None: ...

class PrefillStart(_message.Message):
    __slots__ = ("request_id", "attempt", "ticket", "priority", "prompt_tokens", "sampling", "tenant", "hash_seed", "deadline_remaining_ns", "traceparent", "tracestate", "baggage", "lease_ms", "skip_blocks", "expected_incarnation", "decode_incarnation", "decode_worker_id", "generation", "probe", "router_id", "adapter", "pooling", "prefix", "prefix_then", "kv_share", "retention", "held_only")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_REMAINING_NS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    BAGGAGE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    SKIP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    PREFIX_THEN_FIELD_NUMBER: _ClassVar[int]
    KV_SHARE_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    HELD_ONLY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    ticket: int
    priority: int
    prompt_tokens: bytes
    sampling: _common_pb2.SamplingParams
    tenant: str
    hash_seed: bytes
    deadline_remaining_ns: int
    traceparent: str
    tracestate: str
    baggage: str
    lease_ms: int
    skip_blocks: int
    expected_incarnation: bytes
    decode_incarnation: bytes
    decode_worker_id: str
    generation: int
    probe: bool
    router_id: str
    adapter: _common_pb2.Adapter
    pooling: str
    prefix: _common_pb2.PrefixSource
    prefix_then: _containers.RepeatedCompositeFieldContainer[_common_pb2.PrefixSource]
    kv_share: float
    retention: _common_pb2.Retention
    held_only: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., ticket: _Optional[int] = ..., priority: _Optional[int] = ..., prompt_tokens: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., tenant: _Optional[str] = ..., hash_seed: _Optional[bytes] = ..., deadline_remaining_ns: _Optional[int] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., baggage: _Optional[str] = ..., lease_ms: _Optional[int] = ..., skip_blocks: _Optional[int] = ..., expected_incarnation: _Optional[bytes] = ..., decode_incarnation: _Optional[bytes] = ..., decode_worker_id: _Optional[str] = ..., generation: _Optional[int] = ..., probe: _Optional[bool] = ..., router_id: _Optional[str] = ..., adapter: _Optional[_Union[_common_pb2.Adapter, _Mapping]] = ..., pooling: _Optional[str] = ..., prefix: _Optional[_Union[_common_pb2.PrefixSource, _Mapping]] = ..., prefix_then: _Optional[_Iterable[_Union[_common_pb2.PrefixSource, _Mapping]]] = ..., kv_share: _Optional[float] = ..., retention: _Optional[_Union[_common_pb2.Retention, _Mapping]] = ..., held_only: _Optional[bool] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class PrefillCancel(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("accepted", "published", "first_tokens", "commit", "failed", "heartbeat")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    accepted: PrefillAccepted
    published: Published
    first_tokens: FirstTokens
    commit: CommitRecord
    failed: _common_pb2.Error
    heartbeat: Renew
    def __init__(self, accepted: _Optional[_Union[PrefillAccepted, _Mapping]] = ..., published: _Optional[_Union[Published, _Mapping]] = ..., first_tokens: _Optional[_Union[FirstTokens, _Mapping]] = ..., commit: _Optional[_Union[CommitRecord, _Mapping]] = ..., failed: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., heartbeat: _Optional[_Union[Renew, _Mapping]] = ...) -> None: ...

class PrefillAccepted(_message.Message):
    __slots__ = ("identity", "resumed")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    identity: _common_pb2.WorkerIdentity
    resumed: bool
    def __init__(self, identity: _Optional[_Union[_common_pb2.WorkerIdentity, _Mapping]] = ..., resumed: _Optional[bool] = ...) -> None: ...

class Published(_message.Message):
    __slots__ = ("kv_group", "layer_begin", "layer_count", "block_begin", "block_count", "valid_tokens", "head_begin", "head_count")
    KV_GROUP_FIELD_NUMBER: _ClassVar[int]
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BEGIN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    VALID_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HEAD_BEGIN_FIELD_NUMBER: _ClassVar[int]
    HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    kv_group: int
    layer_begin: int
    layer_count: int
    block_begin: int
    block_count: int
    valid_tokens: int
    head_begin: int
    head_count: int
    def __init__(self, kv_group: _Optional[int] = ..., layer_begin: _Optional[int] = ..., layer_count: _Optional[int] = ..., block_begin: _Optional[int] = ..., block_count: _Optional[int] = ..., valid_tokens: _Optional[int] = ..., head_begin: _Optional[int] = ..., head_count: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "logprob", "has_logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    HAS_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: _common_pb2.TokenLogprob
    has_logprob: bool
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[_Union[_common_pb2.TokenLogprob, _Mapping]] = ..., has_logprob: _Optional[bool] = ...) -> None: ...

class FirstTokens(_message.Message):
    __slots__ = ("choices", "cached_tokens", "queue_ns", "prefill_ns", "prompt_logprobs", "embedding", "computed_ns", "engine_transfer")
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_NS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedCompositeFieldContainer[FirstToken]
    cached_tokens: int
    queue_ns: int
    prefill_ns: int
    prompt_logprobs: _common_pb2.PromptLogprobs
    embedding: bytes
    computed_ns: int
    engine_transfer: bytes
    def __init__(self, choices: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., queue_ns: _Optional[int] = ..., prefill_ns: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ..., embedding: _Optional[bytes] = ..., computed_ns: _Optional[int] = ..., engine_transfer: _Optional[bytes] = ...) -> None: ...

class CommitRecord(_message.Message):
    __slots__ = ("rectangles", "payload_bytes", "valid_tokens", "manifest_digest")
    RECTANGLES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    VALID_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    rectangles: int
    payload_bytes: int
    valid_tokens: int
    manifest_digest: int
    def __init__(self, rectangles: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., valid_tokens: _Optional[int] = ..., manifest_digest: _Optional[int] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "generation", "source_incarnation", "kv_slices", "reader_incarnation", "capability", "encoding")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KV_SLICES_FIELD_NUMBER: _ClassVar[int]
    READER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    generation: int
    source_incarnation: bytes
    kv_slices: _containers.RepeatedCompositeFieldContainer[KvSlice]
    reader_incarnation: bytes
    capability: bytes
    encoding: _common_pb2.ChunkEncoding
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., generation: _Optional[int] = ..., source_incarnation: _Optional[bytes] = ..., kv_slices: _Optional[_Iterable[_Union[KvSlice, _Mapping]]] = ..., reader_incarnation: _Optional[bytes] = ..., capability: _Optional[bytes] = ..., encoding: _Optional[_Union[_common_pb2.ChunkEncoding, str]] = ...) -> None: ...

class KvSlice(_message.Message):
    __slots__ = ("kv_group", "layer_begin", "layer_count", "head_begin", "head_count", "block_begin", "block_count", "valid_tokens")
    KV_GROUP_FIELD_NUMBER: _ClassVar[int]
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    HEAD_BEGIN_FIELD_NUMBER: _ClassVar[int]
    HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BEGIN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    VALID_TOKENS_FIELD_NUMBER: _ClassVar[int]
    kv_group: int
    layer_begin: int
    layer_count: int
    head_begin: int
    head_count: int
    block_begin: int
    block_count: int
    valid_tokens: int
    def __init__(self, kv_group: _Optional[int] = ..., layer_begin: _Optional[int] = ..., layer_count: _Optional[int] = ..., head_begin: _Optional[int] = ..., head_count: _Optional[int] = ..., block_begin: _Optional[int] = ..., block_count: _Optional[int] = ..., valid_tokens: _Optional[int] = ...) -> None: ...

class ChunkHeader(_message.Message):
    __slots__ = ("request_id", "attempt", "generation", "source_incarnation", "kv_slice", "payload_bytes", "digests", "error", "pages", "encoding")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KV_SLICE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    generation: int
    source_incarnation: bytes
    kv_slice: KvSlice
    payload_bytes: int
    digests: bytes
    error: _common_pb2.Error
    pages: _containers.RepeatedScalarFieldContainer[int]
    encoding: _common_pb2.ChunkEncoding
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., generation: _Optional[int] = ..., source_incarnation: _Optional[bytes] = ..., kv_slice: _Optional[_Union[KvSlice, _Mapping]] = ..., payload_bytes: _Optional[int] = ..., digests: _Optional[bytes] = ..., error: _Optional[_Union[_common_pb2.Error, _Mapping]] = ..., pages: _Optional[_Iterable[int]] = ..., encoding: _Optional[_Union[_common_pb2.ChunkEncoding, str]] = ...) -> None: ...

class PoolRequest(_message.Message):
    __slots__ = ("serial", "attach", "pull", "let_go")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    LET_GO_FIELD_NUMBER: _ClassVar[int]
    serial: int
    attach: PoolAttach
    pull: PullRequest
    let_go: Release
    def __init__(self, serial: _Optional[int] = ..., attach: _Optional[_Union[PoolAttach, _Mapping]] = ..., pull: _Optional[_Union[PullRequest, _Mapping]] = ..., let_go: _Optional[_Union[Release, _Mapping]] = ...) -> None: ...

class PoolAttach(_message.Message):
    __slots__ = ("fleet_token", "incarnation", "pull")
    FLEET_TOKEN_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    fleet_token: str
    incarnation: bytes
    pull: PullRequest
    def __init__(self, fleet_token: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., pull: _Optional[_Union[PullRequest, _Mapping]] = ...) -> None: ...

class PoolLoan(_message.Message):
    __slots__ = ("serial", "chunks")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    serial: int
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkHeader]
    def __init__(self, serial: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[ChunkHeader, _Mapping]]] = ...) -> None: ...

class PairRequest(_message.Message):
    __slots__ = ("serial", "open", "pull")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    serial: int
    open: PairOpen
    pull: PullRequest
    def __init__(self, serial: _Optional[int] = ..., open: _Optional[_Union[PairOpen, _Mapping]] = ..., pull: _Optional[_Union[PullRequest, _Mapping]] = ...) -> None: ...

class PairOpen(_message.Message):
    __slots__ = ("incarnation", "host")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    incarnation: bytes
    host: str
    def __init__(self, incarnation: _Optional[bytes] = ..., host: _Optional[str] = ...) -> None: ...

class PairReply(_message.Message):
    __slots__ = ("serial", "store_port", "posted_bytes", "ended", "failed")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    STORE_PORT_FIELD_NUMBER: _ClassVar[int]
    POSTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    serial: int
    store_port: int
    posted_bytes: int
    ended: Release
    failed: _common_pb2.Error
    def __init__(self, serial: _Optional[int] = ..., store_port: _Optional[int] = ..., posted_bytes: _Optional[int] = ..., ended: _Optional[_Union[Release, _Mapping]] = ..., failed: _Optional[_Union[_common_pb2.Error, _Mapping]] = ...) -> None: ...
