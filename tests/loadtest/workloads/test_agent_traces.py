"""Traces of agents of aiperf and OpenTelemetry: graphs, shared prefixes, damaged files."""

import json
import subprocess
from pathlib import Path

import pytest

from loadtest.workloads import agentx, otel_spans
from loadtest.workloads.agent_traces import agent_calls, is_agent_trace
from loadtest.workloads.agentx import write_agentx
from loadtest.workloads.call_graph import agent_trace_plan, trace_requests
from loadtest.workloads.prompts import PromptWriter
from loadtest.workloads.traces import TraceError
from tests.clients.environments import CLIENTS, _folder
from tests.loadtest.workloads.agent_files import (
    FORK,
    SPANS,
    call,
    request,
    session,
    span,
    subagent,
    written,
)

AFTER = [(), (0,), (0,), (1,), (2, 3)]  # of first, a1, b, a2, last
PAUSES_S = [0.0, 1.0, 1.0, 1.0, 1.5]


def dumped(path: Path, *traces: dict) -> Path:
    if len(traces) == 1:
        path = path.with_suffix(".json")
        path.write_text(json.dumps(traces[0], indent=1))
        return path
    path.mkdir()
    for number, trace in enumerate(traces):
        (path / f"{number}.json").write_text(json.dumps(trace))
    return path


def plan(calls, **more):
    return agent_trace_plan(calls, **({"name": "x", "seed": 1, "speed": 1, "shrink": 1} | more))


def shared(calls, one: int, other: int, shrink: float = 1) -> int:
    """Words that two prompts begin with."""
    writer = PromptWriter(1)
    turns = {turn.index: turn for turn in plan(calls, shrink=shrink).turns()}
    texts = [writer.token_ids(turns[index].prompt) for index in (one, other)]
    return next(
        (n for n, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts))
    )


@pytest.fixture(params=["aiperf", "spans"])
def fork(request, tmp_path):
    if request.param == "aiperf":
        return agent_calls(dumped(tmp_path / "fork", FORK))
    return agent_calls(written(tmp_path / "fork", SPANS[5:], SPANS[:5]))


def test_both_formats_are_the_same_graph_and_share_the_same_prefixes(fork):
    assert [call.after for call in fork] == AFTER
    assert [call.input_tokens for call in fork] == [200, 130, 130, 200, 300]
    assert [call.output_tokens for call in fork][:2] == [5, 5]
    [conversation] = plan(fork).conversations
    assert [turn.after for turn in conversation.turns] == AFTER
    assert [turn.think_s for turn in conversation.turns] == pytest.approx(PAUSES_S)
    assert [turn.prompt_tokens for turn in conversation.turns] == [200, 130, 130, 200, 300]
    assert len({turn.session for turn in conversation.turns}) == 3
    assert [turn.number for turn in conversation.turns] == [1, 1, 1, 2, 2]
    # with first: the sub-agents 64 tokens, the last call three blocks; a2 has two of a1
    assert [shared(fork, 0, other) for other in (1, 2, 4)] == [64, 64, 192]
    assert shared(fork, 1, 3) == 128
    assert shared(fork, 1, 2) == 64
    assert shared(fork, 0, 4, shrink=10) == 19


def test_speed_and_shrink_divide_pauses_and_lengths(fork):
    small = plan(fork, speed=2, shrink=100)
    turns = list(small.turns())
    assert [turn.think_s for turn in turns] == pytest.approx([s / 2 for s in PAUSES_S])
    assert [turn.prompt_tokens for turn in turns] == [2, 1, 1, 2, 3]
    assert [turn.max_tokens for turn in turns] == [1] * 5
    with pytest.raises(TraceError, match="above 0"):
        plan(fork, speed=0)


def test_the_simulator_gets_the_blocks_at_the_ends_of_its_own(tmp_path):
    long = session(
        request(0, 1, 1100, list(range(17))),
        request(2, 1, 1200, [*range(15), 100, 101, 102]),
    )
    one, other = trace_requests(agent_calls(dumped(tmp_path / "long", long)))
    assert [len(one.block_hashes), len(other.block_hashes)] == [3, 3]
    same = [a == b for a, b in zip(one.block_hashes, other.block_hashes, strict=True)]
    assert same == [True, False, False]
    assert (other.after, other.pause_s) == ((0,), 1.0)


def test_equal_hashes_of_two_sessions_or_after_another_prefix_are_other_text(tmp_path):
    two = [
        session(request(0, 1, 128, [1, 2]), name="a"),
        session(request(0, 1, 128, [1, 2]), name="b"),
    ]
    calls = agent_calls(dumped(tmp_path / "two", *two))
    assert shared(calls, 0, 1) == 0
    assert [c.start_s for c in plan(calls).conversations] == [0.0, 1.0]
    moved = session(request(0, 1, 128, [1, 2]), request(2, 1, 128, [3, 2]))
    calls = agent_calls(dumped(tmp_path / "moved", moved))
    assert not set(calls[0].blocks) & set(calls[1].blocks)


def test_times_of_sub_agents_may_count_from_their_start_and_sums_of_decimals_compare(tmp_path):
    trace = session(
        request(1.1, 2.2, 64, []),
        subagent(3.3, "a", request(0, 0.1, 64, []), request(0.1, 0.2, 64, [])),
        request(3.6, 1, 64, []),
    )
    calls = agent_calls(dumped(tmp_path / "old", trace))
    assert [call.after for call in calls] == [(), (0,), (1,), (2,)]


def test_calls_of_a_fleet_alone_are_sessions_by_their_name_and_by_their_trace(tmp_path):
    spans = [
        call("one", "client-1", 0, 1, 300, kind=2, session="chat", cached=128),
        call("two", "client-2", 3, 4, 400, flags=0x300, session="chat") | {"traceId": "t2"},
        call("alone", "", 0.5, 5, 200, cached=128) | {"traceId": "t3"},
        span("broken", "", 2, 3, operation="chat", session="chat"),  # no usage
    ]
    calls = agent_calls(written(tmp_path / "fleet", spans))
    assert [(call.session, call.after) for call in calls] == [
        ("chat", ()),
        ("t3", ()),
        ("chat", (0,)),
    ]
    assert shared(calls, 0, 1) == 128  # what was cached of a first prompt
    assert shared(calls, 0, 2) == 256
    assert [c.start_s for c in plan(calls).conversations] == [0.0, 0.5]


def test_links_are_waited_for(tmp_path):
    spans = [
        call("a", "", 0, 1, 64),
        call("b", "", 0, 5, 64),
        call("c", "a2", 6, 7, 64, links=[{"traceId": "t1", "spanId": "a"}]),
        span("a2", "", 0, 9),
        call(
            "d",
            "",
            8,
            9,
            64,
            links=[{"traceId": "t1", "spanId": "c"}, {"traceId": "x", "spanId": "y"}],
        ),
    ]
    calls = agent_calls(written(tmp_path / "links", spans))
    assert [call.after for call in calls] == [(), (), (0,), (0, 1, 2)]


def test_a_written_trace_is_read_as_the_same_graph(fork, tmp_path):
    write_agentx(fork, tmp_path / "new")
    again = agent_calls(tmp_path / "new")
    assert [call.after for call in again] == AFTER
    assert [plan(again).conversations[0].turns[i].prompt for i in range(5)] == [
        turn.prompt for turn in plan(fork).turns()
    ]
    with pytest.raises(FileExistsError):
        write_agentx(fork, tmp_path / "new")


AIPERF = """
import json, sys
from pathlib import Path
from aiperf.dataset.loader.weka_agent_chains import detect_agent_chains
from aiperf.dataset.loader.weka_trace import WekaTraceLoader
folder = Path(sys.argv[1])
assert WekaTraceLoader.can_load(filename=folder)
loader = object.__new__(WekaTraceLoader)  # its constructor needs a whole run
loader._path = folder
for [trace] in loader.load_dataset().values():
    own = [(n, r) for n, r in enumerate(trace.requests) if r.type != "subagent"]
    agents = [len(r.requests) for r in trace.requests if r.type == "subagent"]
    chains = len(detect_agent_chains(own).chains)
    print(json.dumps([trace.id, len(own), agents, chains]))
"""


def test_aiperf_loads_what_is_written(fork, tmp_path):
    client = next(client for client in CLIENTS if client.name == "aiperf")
    python = _folder(client) / "bin" / "python"
    if not python.exists():
        pytest.skip(f"aiperf's environment is not there: {python}")
    write_agentx(fork, tmp_path / "new")
    command = [str(python), "-c", AIPERF, str(tmp_path / "new")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout) == [fork[0].session, 2, [2, 1], 1]


GOOD = request(0, 1, 64, [])


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (session(GOOD | {"t": -1}), r"Expected `float` >= 0.* `\$.requests\[0\].t`"),
        (session(GOOD | {"api_time": -1}), r"`\$.requests\[0\].api_time`"),
        (session(GOOD, GOOD | {"in": 0}), r">= 1 - at `\$.requests\[1\].in`"),
        (session(GOOD | {"in": 10**8}), r"<= 10000000 - at `\$.requests\[0\].in`"),
        (session(subagent(0, "a", GOOD | {"out": -1})), r"requests\[0\].requests\[0\].out`"),
        (session(GOOD | {"type": "x"}), r"Invalid value 'x' - at `\$.requests\[0\].type`"),
        (session(GOOD) | {"block_size": 0}, r"`\$.block_size`"),
        (session(GOOD) | {"hash_id_scope": "global"}, r"`\$.hash_id_scope`"),
        (session(), "contains no requests"),
    ],
)
def test_a_damaged_aiperf_trace_names_the_field(tmp_path, trace, said):
    with pytest.raises(TraceError, match=r"bad\.json: .*" + said):
        agent_calls(dumped(tmp_path / "bad", trace))


CYCLE = [call("c", "p", 0, 1, 9), span("p", "q", 0, 1), span("q", "p", 0, 1)]


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        (CYCLE, "2: span [pq]: parentSpanId: a cycle"),
        ([call("c", "gone", 0, 1, 9)], "2: span c: parentSpanId: gone is not in the file"),
        ([call("c", "", 2, 1, 9)], "2: span c: endTimeUnixNano is before"),
        ([call("c", "", -2000, 1, 9)], r"2: .*>= 0 - at `.*startTimeUnixNano`"),
        ([call("c", "", 0, 1, 0)], "2: span c: gen_ai.usage.input_tokens: needs 1 to"),
        ([call("c", "", 0, 1, -5)], "2: span c: gen_ai.usage.input_tokens: needs 1 to"),
        ([call("c", "", 0, 1, 9, output="many")], "2: span c: gen_ai.usage.output_tokens: needs"),
        ([call("c", "", 0, 1, 9) | {"spanId": 7}], "2: .*spanId"),
    ],
)
def test_a_damaged_span_names_the_line_and_the_field(tmp_path, spans, said):
    with pytest.raises(TraceError, match=r"bad:" + f"(?:{said})"):
        agent_calls(written(tmp_path / "bad", [], spans))


def test_deeply_nested_json_is_an_error(tmp_path):
    (tmp_path / "deep.json").write_text('{"resourceSpans": [], "x": ' + "[" * 100_000)
    (tmp_path / "other.json").write_text('{"id": "s", "requests": [], "x": ' + "[" * 100_000)
    for name in ("deep.json", "other.json"):
        with pytest.raises(TraceError, match=name):
            agent_calls(tmp_path / name)


def test_sizes_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(agentx, "MAX_CALLS", 1)
    monkeypatch.setattr(otel_spans, "MAX_CALLS", 1)
    with pytest.raises(TraceError, match="more than 1 requests"):
        agent_calls(dumped(tmp_path / "a", session(GOOD, GOOD)))
    with pytest.raises(TraceError, match="more than 1 calls"):
        agent_calls(written(tmp_path / "b", SPANS))
    monkeypatch.setattr(otel_spans, "MAX_CALLS", 9)
    monkeypatch.setattr(otel_spans, "MAX_BLOCKS", 10)
    with pytest.raises(TraceError, match="more than 640 tokens"):
        agent_calls(written(tmp_path / "b", SPANS))
    monkeypatch.setattr(otel_spans, "_MAX_SPANS", 3)
    with pytest.raises(TraceError, match=":1: more than 3 spans"):
        agent_calls(written(tmp_path / "b", SPANS))
    monkeypatch.setattr(agentx, "MAX_BLOCKS", 3)
    with pytest.raises(TraceError, match="hash_ids: more than 3 blocks"):
        agent_calls(dumped(tmp_path / "a", session(GOOD | {"in": 256, "hash_ids": [1, 1, 1, 1]})))
    monkeypatch.setattr(agentx, "_MAX_FILE_BYTES", 10)
    with pytest.raises(TraceError, match="larger than 10 bytes"):
        agent_calls(dumped(tmp_path / "a", session(GOOD)))


def test_other_files_are_no_traces_of_agents(tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5}\n')
    assert not is_agent_trace(other)
    with pytest.raises(TraceError, match="neither spans"):
        agent_calls(other)
