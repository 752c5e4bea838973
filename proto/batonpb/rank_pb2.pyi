from batonpb import common_pb2 as _common_pb2
from batonpb import prefill_pb2 as _prefill_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TakeOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISSING: _ClassVar[TakeOutcome]
    STORED: _ClassVar[TakeOutcome]
    DAMAGED: _ClassVar[TakeOutcome]
    GONE: _ClassVar[TakeOutcome]
MISSING: TakeOutcome
STORED: TakeOutcome
DAMAGED: TakeOutcome
GONE: TakeOutcome

class LeaderWord(_message.Message):
    __slots__ = ("begin", "serve", "hold", "publish", "revoke", "take")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    SERVE_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    TAKE_FIELD_NUMBER: _ClassVar[int]
    begin: RankBegin
    serve: RankServe
    hold: RankHold
    publish: RankPublish
    revoke: RankRevoke
    take: RankTake
    def __init__(self, begin: _Optional[_Union[RankBegin, _Mapping]] = ..., serve: _Optional[_Union[RankServe, _Mapping]] = ..., hold: _Optional[_Union[RankHold, _Mapping]] = ..., publish: _Optional[_Union[RankPublish, _Mapping]] = ..., revoke: _Optional[_Union[RankRevoke, _Mapping]] = ..., take: _Optional[_Union[RankTake, _Mapping]] = ...) -> None: ...

class RankWord(_message.Message):
    __slots__ = ("listens", "serves", "published", "given_back", "taken", "beat", "sent_bytes")
    LISTENS_FIELD_NUMBER: _ClassVar[int]
    SERVES_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    GIVEN_BACK_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    listens: RankListens
    serves: RankServes
    published: int
    given_back: str
    taken: RankTaken
    beat: _prefill_pb2.Renew
    sent_bytes: int
    def __init__(self, listens: _Optional[_Union[RankListens, _Mapping]] = ..., serves: _Optional[_Union[RankServes, _Mapping]] = ..., published: _Optional[int] = ..., given_back: _Optional[str] = ..., taken: _Optional[_Union[RankTaken, _Mapping]] = ..., beat: _Optional[_Union[_prefill_pb2.Renew, _Mapping]] = ..., sent_bytes: _Optional[int] = ...) -> None: ...

class RankBegin(_message.Message):
    __slots__ = ("rank", "engine_settings")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ENGINE_SETTINGS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    engine_settings: bytes
    def __init__(self, rank: _Optional[int] = ..., engine_settings: _Optional[bytes] = ...) -> None: ...

class RankListens(_message.Message):
    __slots__ = ("port", "secret")
    PORT_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    port: int
    secret: str
    def __init__(self, port: _Optional[int] = ..., secret: _Optional[str] = ...) -> None: ...

class RankServe(_message.Message):
    __slots__ = ("num_blocks", "kv_group", "ranks", "incarnation", "unsigned_pulls")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_GROUP_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    UNSIGNED_PULLS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    kv_group: _common_pb2.KvGroup
    ranks: int
    incarnation: bytes
    unsigned_pulls: bool
    def __init__(self, num_blocks: _Optional[int] = ..., kv_group: _Optional[_Union[_common_pb2.KvGroup, _Mapping]] = ..., ranks: _Optional[int] = ..., incarnation: _Optional[bytes] = ..., unsigned_pulls: _Optional[bool] = ...) -> None: ...

class RankServes(_message.Message):
    __slots__ = ("pid", "host")
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    pid: int
    host: str
    def __init__(self, pid: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...

class RankHold(_message.Message):
    __slots__ = ("name", "request_id", "attempt", "generation", "prompt_tokens", "pages", "decode_incarnation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    request_id: str
    attempt: int
    generation: int
    prompt_tokens: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    decode_incarnation: bytes
    def __init__(self, name: _Optional[str] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., generation: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ..., decode_incarnation: _Optional[bytes] = ...) -> None: ...

class RankPublish(_message.Message):
    __slots__ = ("serial", "name", "kv_slice")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KV_SLICE_FIELD_NUMBER: _ClassVar[int]
    serial: int
    name: str
    kv_slice: _prefill_pb2.KvSlice
    def __init__(self, serial: _Optional[int] = ..., name: _Optional[str] = ..., kv_slice: _Optional[_Union[_prefill_pb2.KvSlice, _Mapping]] = ...) -> None: ...

class RankRevoke(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RankTake(_message.Message):
    __slots__ = ("serial", "address", "pull", "pages", "budget_ms")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MS_FIELD_NUMBER: _ClassVar[int]
    serial: int
    address: str
    pull: _prefill_pb2.PullRequest
    pages: _containers.RepeatedScalarFieldContainer[int]
    budget_ms: int
    def __init__(self, serial: _Optional[int] = ..., address: _Optional[str] = ..., pull: _Optional[_Union[_prefill_pb2.PullRequest, _Mapping]] = ..., pages: _Optional[_Iterable[int]] = ..., budget_ms: _Optional[int] = ...) -> None: ...

class RankTaken(_message.Message):
    __slots__ = ("serial", "outcomes", "reason")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    serial: int
    outcomes: _containers.RepeatedScalarFieldContainer[TakeOutcome]
    reason: str
    def __init__(self, serial: _Optional[int] = ..., outcomes: _Optional[_Iterable[_Union[TakeOutcome, str]]] = ..., reason: _Optional[str] = ...) -> None: ...
