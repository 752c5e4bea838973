"""Records of requests and of clients.

Times are seconds since second 0 of the plan, on the machine's monotonic clock, which all client
processes share.
"""

from typing import Literal

import msgspec

from loadtest.workloads.plan import Plan

End = Literal[
    "ok",  # the whole response arrived
    "http_error",  # a status other than 200; see `status` and `detail`
    "stream_error",  # the server sent a typed error in the stream
    "broken_stream",  # the stream ended or was unreadable before the response was complete
    "timeout",  # the client's time limit passed
    "connection",  # no connection, or no response headers on it
    "aborted",  # the plan aborted it
]


class CallRecord(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """Record of a request, from its planned time to its end."""

    index: int  # in the plan
    client: int
    group: str = ""
    tenant: str = ""
    session: int | None = None  # this and the next one only of agents
    turn: int = 0
    intended_s: float  # planned time; latencies count from here
    sent_s: float  # the client started to connect
    connected_s: float | None = None  # the request was written; None without a connection
    chunk_s: list[float] = []  # arrival of each chunk with text
    ended_s: float
    end: End
    status: int = 0  # HTTP status; 0 without a response
    detail: str = ""
    finish_reason: str = ""
    planned_prompt_tokens: int
    planned_answer_tokens: int
    prompt_tokens: int | None = None  # this and the next two as counted by the server
    answer_tokens: int | None = None
    cached_tokens: int | None = None
    request_id: str = ""  # header x-request-id, or `id` of the response
    answer: str | None = None  # text, if kept
    retry_after: str = ""  # header of the response


class ClientReport(msgspec.Struct, frozen=True, kw_only=True, tag="client"):
    """Timing quality of a client, sent when it ends."""

    client: int
    requests: int
    lag_p50_s: float  # delay of timers in its event loop
    lag_p99_s: float
    lag_max_s: float
    cpu_share: float  # average share of one core
    wall_s: float


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Server, and options of requests to it."""

    url: str  # http://host:port, without /v1
    model: str
    api_key: str = ""
    tenant_keys: dict[str, str] = {}  # tenant of the plan -> its API key
    endpoint: Literal["chat", "completions"] = "chat"
    token_ids: bool = False  # send prompts as token ids; completions only
    tools: Literal["", "callable", "described"] = ""  # of agents; described: in the system prompt
    ignore_eos: bool = True  # make responses as long as planned
    include_usage: bool = True
    timeout_s: float = 600.0
    headers: dict[str, str] = {}


class ClientJob(msgspec.Struct, frozen=True, kw_only=True):
    """Job of a client process, sent to its standard input."""

    client: int
    server: ServerOptions
    plan: Plan  # this client's share
    keep_answers: bool = False


class ClientReady(msgspec.Struct, frozen=True, tag="ready"):
    """Signal of a client that it has read its job and waits for second 0."""


Message = CallRecord | ClientReport | ClientReady
