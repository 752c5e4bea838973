"""Small traces of agents in both formats: a fork of two sub-agents, and a join.

first ─▶ a1 ─▶ a2 ─┐
      └▶ b ────────┴─▶ last
"""

import json
from pathlib import Path

SECOND = 10**9


def request(t: float, api_time: float, tokens: int, hashes: list[int], **more) -> dict:
    lengths = {"in": tokens, "out": 5, "hash_ids": hashes}
    return {"type": "n", "t": t, "api_time": api_time, "model": "m", **lengths, **more}


def subagent(t: float, name: str, *requests: dict) -> dict:
    words = {"agent_id": name, "subagent_type": "Explore", "status": "completed", "models": ["m"]}
    return {"type": "subagent", "t": t, "requests": list(requests), **words}


def session(*requests: dict, name: str = "s") -> dict:
    head = {"id": name, "models": ["m"], "block_size": 64, "hash_id_scope": "local"}
    return {**head, "requests": list(requests)}


FORK = session(
    request(1, 1, 200, [1, 2, 3]),
    subagent(3, "a", request(3, 1, 130, [1, 9]), request(5, 1, 200, [1, 9, 10])),
    subagent(3, "b", request(3, 4, 130, [1, 11], type="s", out=0, ttft=0.1)),
    request(8.5, 1, 300, [1, 2, 3, 4]),
)


def span(name: str, parent: str, begin_s: float, end_s: float, **values: object) -> dict:
    """``values``: operation, input, output, cached, session; kind and links are the span's own."""
    keys = {
        "operation": "gen_ai.operation.name",
        "session": "gen_ai.conversation.id",
        "input": "gen_ai.usage.input_tokens",
        "output": "gen_ai.usage.output_tokens",
        "cached": "gen_ai.usage.cache_read.input_tokens",
    }
    attributes = [
        {
            "key": keys[key],
            "value": {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)},
        }
        for key, value in values.items()
        if key in keys
    ]
    own = {key: value for key, value in values.items() if key not in keys}
    return {
        "traceId": "t1",
        "spanId": name,
        "parentSpanId": parent,
        "startTimeUnixNano": str(round((1000 + begin_s) * SECOND)),
        "endTimeUnixNano": str(round((1000 + end_s) * SECOND)),
        "attributes": attributes,
        **own,
    }


def call(name: str, parent: str, begin_s: float, end_s: float, tokens: int, **more) -> dict:
    words = {"operation": "chat", "input": tokens, "output": 5, **more}
    return span(name, parent, begin_s, end_s, **words)


SPANS = [
    span("root", "", 1, 9.5, operation="invoke_agent"),
    call("first", "root", 1, 2, 200),
    call("server", "first", 1.1, 1.9, 200, kind=2),  # the same call, as the fleet saw it
    span("tool-a", "root", 3, 6, operation="execute_tool"),
    span("a", "tool-a", 3, 6, operation="invoke_agent"),
    call("a1", "a", 3, 4, 130, cached=64),
    span("tool", "a", 4, 5, operation="execute_tool"),
    call("a2", "a", 5, 6, 200),
    span("tool-b", "root", 3, 7, operation="execute_tool"),
    span("b", "tool-b", 3, 7, operation="invoke_agent"),
    call("b1", "b", 3, 7, 130, cached=64),
    call("last", "root", 8.5, 9.5, 300),
]


def written(path: Path, *lines: list[dict]) -> Path:
    """Write one line of OTLP JSON per list of spans."""
    text = [{"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]} for spans in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in text))
    return path
