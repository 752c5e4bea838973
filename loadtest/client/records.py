"""What a client writes down of a request, and of itself.

Times are seconds since the begin of the run on the machine's monotonic clock, which all client
processes share; a run begins when its plan says 0 s.
"""

from typing import Literal

import msgspec

from loadtest.workloads.plan import Plan

End = Literal[
    "ok",  # the whole answer came
    "http_error",  # a status other than 200; `status` and `detail` say which
    "stream_error",  # the server said in the stream, typed, that it failed
    "broken_stream",  # the stream ended, or was unreadable, before the answer did
    "timeout",  # the client's own limit passed
    "connection",  # no connection, or none that gave an answer's head
    "aborted",  # the plan said to hang up
]

ENDS: tuple[End, ...] = (
    *("ok", "http_error", "stream_error", "broken_stream", "timeout", "connection", "aborted"),
)


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """One request, from intention to end."""

    index: int  # of the plan
    client: int
    group: str = ""
    tenant: str = ""
    intended_s: float  # when the plan wanted it sent; latencies count from here
    sent_s: float  # when the client turned to it: the connection was begun
    connected_s: float | None = None  # when its bytes were written; None: no connection
    chunk_s: list[float] = []  # arrival of each chunk that holds text
    ended_s: float
    end: End
    status: int = 0  # HTTP; 0: none came
    detail: str = ""
    finish_reason: str = ""
    planned_prompt_tokens: int
    planned_answer_tokens: int
    prompt_tokens: int | None = None  # this and the next two as the server counted
    answer_tokens: int | None = None
    cached_tokens: int | None = None
    request_id: str = ""  # of the answer's header x-request-id, or its `id`
    answer: str | None = None  # its text, where asked for


class ClientReport(msgspec.Struct, frozen=True, kw_only=True, tag="client"):
    """How well a client kept time; its last words."""

    client: int
    requests: int
    lag_p50_s: float  # of its event loop: how late it woke up
    lag_p99_s: float
    lag_max_s: float
    cpu_share: float  # of one core, while it ran
    wall_s: float


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How requests to this server are written."""

    url: str  # http://host:port, without /v1
    model: str
    api_key: str = ""
    tenant_keys: dict[str, str] = {}  # tenant of the plan -> its API key
    endpoint: Literal["chat", "completions"] = "chat"
    token_ids: bool = False  # prompts as ids; completions only
    ignore_eos: bool = True  # answers are as long as planned
    include_usage: bool = True
    timeout_s: float = 600.0
    headers: dict[str, str] = {}


class ClientOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a client process is told on its standard input."""

    client: int
    server: ServerOptions
    plan: Plan  # this client's share
    keep_answers: bool = False


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A client has read its order and waits to hear when 0 s is."""


Message = RequestRecord | ClientReport | Ready
