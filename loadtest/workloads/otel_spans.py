"""OpenTelemetry's GenAI spans, as OTLP JSON lines of a collector's file exporter.

A model's call is a span with ``gen_ai.operation.name`` chat, text_completion or generate_content
and ``gen_ai.usage.*``. Other spans are scopes: their parents and times, and links, order the calls.
Calls without a known parent belong to the session ``gen_ai.conversation.id``, else to their trace.

Spans have no text: a prompt continues the prompt before it of its agent. Where it is shorter, or
the first one, ``gen_ai.usage.cache_read.input_tokens`` of it are shared: with the prompt before it,
with that of the call that the agent waits for, or else with all such prompts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from loadtest.workloads.call_graph import (
    BLOCK_TOKENS,
    MAX_BLOCKS,
    MAX_CALLS,
    MAX_TOKENS,
    AgentCall,
    CallDependencies,
    TracePart,
    in_order,
)
from loadtest.workloads.traces import TraceError

_CALLS = ("chat", "text_completion", "generate_content")
_OPERATION = "gen_ai.operation.name"
_MODEL = "gen_ai.request.model"
_SESSION = "gen_ai.conversation.id"
_INPUT = "gen_ai.usage.input_tokens"
_OUTPUT = "gen_ai.usage.output_tokens"
_CACHED = "gen_ai.usage.cache_read.input_tokens"
_REMOTE_KINDS = (2, 5)  # of servers and consumers, whose parents may be in another file
_REMOTE_FLAG = 0x200
_MAX_SPANS = 1_000_000
_MAX_LINE_BYTES = 1 << 26
_MAX_DEPTH = 256
_Ns = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _Value(msgspec.Struct, rename="camel"):
    string_value: str | None = None
    int_value: int | None = None


class _Attribute(msgspec.Struct):
    key: str
    value: _Value = msgspec.field(default_factory=_Value)


class _Link(msgspec.Struct, rename="camel"):
    trace_id: str
    span_id: str


class _Span(_Link, rename="camel"):
    start_time_unix_nano: _Ns
    end_time_unix_nano: _Ns
    parent_span_id: str = ""
    kind: int = 0
    flags: int = 0
    attributes: list[_Attribute] = []
    links: list[_Link] = []


class _Scope(msgspec.Struct):
    spans: list[_Span] = []


class _Resource(msgspec.Struct, rename="camel"):
    scope_spans: list[_Scope] = []


class _Line(msgspec.Struct, rename="camel"):
    resource_spans: list[_Resource]


_Key = tuple[str, str]


class _Node:
    """Span, with its place in the file for errors."""

    def __init__(self, span: _Span, where: str) -> None:
        self.span = span
        self.where = where
        self.values = {each.key: each.value for each in span.attributes}
        self.part = TracePart(span.start_time_unix_nano, span.end_time_unix_nano)
        if span.end_time_unix_nano < span.start_time_unix_nano:
            raise TraceError(f"{where}: endTimeUnixNano is before startTimeUnixNano")

    @property
    def parent(self) -> _Key:
        return self.span.trace_id, self.span.parent_span_id

    @property
    def is_call(self) -> bool:
        return self.text(_OPERATION) in _CALLS and _INPUT in self.values

    def text(self, name: str) -> str:
        return self.values[name].string_value or "" if name in self.values else ""

    def tokens(self, name: str, least: int = 0) -> int:
        value = self.values.get(name, _Value(int_value=0)).int_value
        if value is None or not least <= value <= MAX_TOKENS:
            raise TraceError(f"{self.where}: {name}: needs {least} to {MAX_TOKENS:,} tokens")
        return value


def read_spans(path: Path) -> list[AgentCall]:
    """Read the calls of a file of OTLP JSON lines.

    Raises:
        TraceError: A line cannot be read, spans contradict each other, or there are too many.
        OSError: The file cannot be read.
    """
    nodes = _nodes(path)
    sessions: dict[str, list[TracePart]] = {}
    calls: list[AgentCall] = []
    of_call: list[_Node] = []
    for node in nodes.values():
        above = _above(node, nodes) if node.is_call else []
        if not node.is_call or any(each.is_call for each in above):
            continue  # a server's span of a call that its client has recorded too
        if len(calls) == MAX_CALLS:
            raise TraceError(f"{node.where}: more than {MAX_CALLS:,} calls")
        node.part.call = len(calls)
        calls.append(_call(node, above))
        of_call.append(node)
        below: _Node | None = node
        for each in above:
            is_known = bool(each.part.parts)
            if below is not None:
                each.part.parts.append(below.part)
            each.part.widen(node.part)
            below = None if is_known or below is None else each
        if below is not None:
            sessions.setdefault(calls[-1].session, []).append(below.part)
    order = CallDependencies()
    for parts in sessions.values():
        order.add(parts)
    for node, call in zip(of_call, calls, strict=True):
        for link in node.span.links:
            linked = nodes.get((link.trace_id, link.span_id))
            number = linked.part.call if linked is not None else -1
            if number < 0 or calls[number].session != call.session:
                continue
            if calls[number].start_ns < call.start_ns >= calls[number].end_ns:
                order.after[node.part.call].add(number)
    _add_prompts(calls, of_call, order)
    return in_order(calls, order, path)


def _call(node: _Node, above: Sequence[_Node]) -> AgentCall:
    names = (each.text(_SESSION) for each in (node, *above))
    agents = [each.span.span_id for each in above if each.text(_OPERATION) == "invoke_agent"]
    return AgentCall(
        session=next(filter(None, names), node.span.trace_id),
        agent=agents[0] if len(agents) > 1 else "",
        start_ns=node.span.start_time_unix_nano,
        end_ns=node.span.end_time_unix_nano,
        input_tokens=node.tokens(_INPUT, least=1),
        output_tokens=max(node.tokens(_OUTPUT), 1),
        model=node.text(_MODEL) or "unknown",
    )


def _above(node: _Node, nodes: dict[_Key, _Node]) -> list[_Node]:
    """Return the spans above a call, the nearest first."""
    above: list[_Node] = []
    while node.span.parent_span_id:
        parent = nodes.get(node.parent)
        if parent is None:
            if node.span.kind in _REMOTE_KINDS or node.span.flags & _REMOTE_FLAG:
                break
            raise TraceError(f"{node.where}: parentSpanId: {node.parent[1]} is not in the file")
        if len(above) == _MAX_DEPTH:
            raise TraceError(f"{node.where}: parentSpanId: a cycle, or over {_MAX_DEPTH} levels")
        above.append(parent)
        node = parent
    return above


def _add_prompts(calls: list[AgentCall], nodes: Sequence[_Node], order: CallDependencies) -> None:
    latest: dict[tuple[str, str], AgentCall] = {}
    count = 0  # of different blocks
    total = 0
    for number in order.numbers(calls):
        node, call = nodes[number], calls[number]
        length = call.input_tokens // BLOCK_TOKENS
        total += length
        if total > MAX_BLOCKS:
            raise TraceError(f"{node.where}: more than {MAX_BLOCKS * BLOCK_TOKENS:,} tokens")
        own = latest.get((call.session, call.agent))
        waited = (calls[each] for each in order.after[number])
        base = own or max(waited, key=lambda each: each.end_ns, default=None)
        text = range(MAX_BLOCKS, MAX_BLOCKS + length) if base is None else base.blocks
        grows = own is not None and own.input_tokens <= call.input_tokens
        shared = text[: length if grows else min(node.tokens(_CACHED) // BLOCK_TOKENS, length)]
        new = range(count, count + length - len(shared))
        count += len(new)
        calls[number] = latest[call.session, call.agent] = call._replace(blocks=(*shared, *new))


def _nodes(path: Path) -> dict[_Key, _Node]:
    decoder = msgspec.json.Decoder(_Line, strict=False)  # 64-bit numbers are strings
    nodes: dict[_Key, _Node] = {}
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_MAX_LINE_BYTES):
            number += 1
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                read = decoder.decode(line)
            except (msgspec.DecodeError, RecursionError) as error:
                raise TraceError(f"{where}: {error}") from error
            for resource in read.resource_spans:
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    key = (span.trace_id, span.span_id)
                    nodes.setdefault(key, _Node(span, f"{where}: span {span.span_id}"))
            if len(nodes) > _MAX_SPANS:
                raise TraceError(f"{where}: more than {_MAX_SPANS:,} spans")
    return nodes
