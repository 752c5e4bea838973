from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChunkEncoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLAIN: _ClassVar[ChunkEncoding]
    INT8: _ClassVar[ChunkEncoding]
PLAIN: ChunkEncoding
INT8: ChunkEncoding

class WireRange(_message.Message):
    __slots__ = ("min", "max")
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    min: int
    max: int
    def __init__(self, min: _Optional[int] = ..., max: _Optional[int] = ...) -> None: ...

class KvGroup(_message.Message):
    __slots__ = ("id", "layer_ids", "num_kv_heads", "head_dim", "block_tokens", "dtype", "components")
    ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    id: int
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    components: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[int] = ..., layer_ids: _Optional[_Iterable[int]] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_tokens: _Optional[int] = ..., dtype: _Optional[str] = ..., components: _Optional[_Iterable[str]] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("wire", "kv_groups", "numerics_id", "weights_digest", "model", "max_context_tokens", "transports", "encodings", "hand_off", "images")
    WIRE_FIELD_NUMBER: _ClassVar[int]
    KV_GROUPS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    HAND_OFF_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    wire: WireRange
    kv_groups: _containers.RepeatedCompositeFieldContainer[KvGroup]
    numerics_id: str
    weights_digest: bytes
    model: str
    max_context_tokens: int
    transports: _containers.RepeatedCompositeFieldContainer[TransportOffer]
    encodings: _containers.RepeatedScalarFieldContainer[ChunkEncoding]
    hand_off: str
    images: bool
    def __init__(self, wire: _Optional[_Union[WireRange, _Mapping]] = ..., kv_groups: _Optional[_Iterable[_Union[KvGroup, _Mapping]]] = ..., numerics_id: _Optional[str] = ..., weights_digest: _Optional[bytes] = ..., model: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., transports: _Optional[_Iterable[_Union[TransportOffer, _Mapping]]] = ..., encodings: _Optional[_Iterable[_Union[ChunkEncoding, str]]] = ..., hand_off: _Optional[str] = ..., images: _Optional[bool] = ...) -> None: ...

class TransportOffer(_message.Message):
    __slots__ = ("name", "place", "address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    place: str
    address: str
    def __init__(self, name: _Optional[str] = ..., place: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class WorkerIdentity(_message.Message):
    __slots__ = ("worker_id", "incarnation", "epoch", "role", "host", "address", "pid")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: bytes
    epoch: int
    role: str
    host: str
    address: str
    pid: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., epoch: _Optional[int] = ..., role: _Optional[str] = ..., host: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("keep_s", "share")
    KEEP_S_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    keep_s: int
    share: float
    def __init__(self, keep_s: _Optional[int] = ..., share: _Optional[float] = ...) -> None: ...

class PrefixSource(_message.Message):
    __slots__ = ("worker_id", "incarnation", "address", "blocks", "capability")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: bytes
    address: str
    blocks: int
    capability: bytes
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[bytes] = ..., address: _Optional[str] = ..., blocks: _Optional[int] = ..., capability: _Optional[bytes] = ...) -> None: ...

class BlockCounts(_message.Message):
    __slots__ = ("total", "free", "cached", "leased", "quarantined")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    cached: int
    leased: int
    quarantined: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., leased: _Optional[int] = ..., quarantined: _Optional[int] = ...) -> None: ...

class TransferTotals(_message.Message):
    __slots__ = ("count", "bytes", "failures")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    count: int
    bytes: int
    failures: int
    def __init__(self, count: _Optional[int] = ..., bytes: _Optional[int] = ..., failures: _Optional[int] = ...) -> None: ...

class EdgeRate(_message.Message):
    __slots__ = ("prefill_worker_id", "bytes_per_s", "overhead_s")
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_S_FIELD_NUMBER: _ClassVar[int]
    prefill_worker_id: str
    bytes_per_s: float
    overhead_s: float
    def __init__(self, prefill_worker_id: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., overhead_s: _Optional[float] = ...) -> None: ...

class KvTier(_message.Message):
    __slots__ = ("name", "blocks", "held_blocks", "block_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    blocks: int
    held_blocks: int
    block_s: float
    def __init__(self, name: _Optional[str] = ..., blocks: _Optional[int] = ..., held_blocks: _Optional[int] = ..., block_s: _Optional[float] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("identity", "state", "kv_blocks", "running", "waiting", "threads", "transfers", "event_sequence", "steps", "queued_prompt_tokens", "prefill_tokens_per_s", "decode_step_s", "prefill_overhead_s", "edges", "capabilities", "last_error", "adapters", "highest_ticket", "answering", "load_age_ns", "prefill_token_s", "prefill_context_s", "queued_prompt_context", "kv_tiers", "resting", "decode_base_s", "decode_row_s", "decode_context_s", "answering_context", "coming_context")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    EVENT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_OVERHEAD_S_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_TICKET_FIELD_NUMBER: _ClassVar[int]
    ANSWERING_FIELD_NUMBER: _ClassVar[int]
    LOAD_AGE_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CONTEXT_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROMPT_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    KV_TIERS_FIELD_NUMBER: _ClassVar[int]
    RESTING_FIELD_NUMBER: _ClassVar[int]
    DECODE_BASE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_ROW_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_S_FIELD_NUMBER: _ClassVar[int]
    ANSWERING_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    COMING_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    identity: WorkerIdentity
    state: str
    kv_blocks: BlockCounts
    running: int
    waiting: int
    threads: int
    transfers: TransferTotals
    event_sequence: int
    steps: int
    queued_prompt_tokens: int
    prefill_tokens_per_s: float
    decode_step_s: float
    prefill_overhead_s: float
    edges: _containers.RepeatedCompositeFieldContainer[EdgeRate]
    capabilities: Capabilities
    last_error: str
    adapters: _containers.RepeatedScalarFieldContainer[bytes]
    highest_ticket: int
    answering: int
    load_age_ns: int
    prefill_token_s: float
    prefill_context_s: float
    queued_prompt_context: int
    kv_tiers: _containers.RepeatedCompositeFieldContainer[KvTier]
    resting: bool
    decode_base_s: float
    decode_row_s: float
    decode_context_s: float
    answering_context: int
    coming_context: int
    def __init__(self, identity: _Optional[_Union[WorkerIdentity, _Mapping]] = ..., state: _Optional[str] = ..., kv_blocks: _Optional[_Union[BlockCounts, _Mapping]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., threads: _Optional[int] = ..., transfers: _Optional[_Union[TransferTotals, _Mapping]] = ..., event_sequence: _Optional[int] = ..., steps: _Optional[int] = ..., queued_prompt_tokens: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_step_s: _Optional[float] = ..., prefill_overhead_s: _Optional[float] = ..., edges: _Optional[_Iterable[_Union[EdgeRate, _Mapping]]] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., last_error: _Optional[str] = ..., adapters: _Optional[_Iterable[bytes]] = ..., highest_ticket: _Optional[int] = ..., answering: _Optional[int] = ..., load_age_ns: _Optional[int] = ..., prefill_token_s: _Optional[float] = ..., prefill_context_s: _Optional[float] = ..., queued_prompt_context: _Optional[int] = ..., kv_tiers: _Optional[_Iterable[_Union[KvTier, _Mapping]]] = ..., resting: _Optional[bool] = ..., decode_base_s: _Optional[float] = ..., decode_row_s: _Optional[float] = ..., decode_context_s: _Optional[float] = ..., answering_context: _Optional[int] = ..., coming_context: _Optional[int] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop_token_ids", "ignore_eos", "min_tokens", "logprobs", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "prompt_logprobs", "bad_words", "grammar")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    n: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    min_tokens: int
    logprobs: int
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    prompt_logprobs: int
    bad_words: _containers.RepeatedScalarFieldContainer[bytes]
    grammar: str
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., prompt_logprobs: _Optional[int] = ..., bad_words: _Optional[_Iterable[bytes]] = ..., grammar: _Optional[str] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: bytes
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "digest", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: bytes
    path: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[bytes] = ..., path: _Optional[str] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("begin", "alternatives", "logprobs", "ranks", "top_ids", "top_logprobs")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    begin: int
    alternatives: int
    logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, begin: _Optional[int] = ..., alternatives: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "retryable")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retryable: bool
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ...) -> None: ...
