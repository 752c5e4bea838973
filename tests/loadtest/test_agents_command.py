"""`baton loadtest agents` against small real servers: what they get, and what the report has."""

import asyncio
import json

from loadtest.results.files import read_results
from tests.loadtest.test_commands import run
from tests.loadtest.tiny_server import Stream, tiny_server, words
from tests.loadtest.workloads.agent_files import FORK, SPANS, written

SMALL = ("--turns", 3, "--think-s", 0.01, "--system-tokens", 5000, "--turn-tokens", 50)
TWO = (*SMALL, "--sessions", 2, "--answer-tokens", 3)


async def calls(body: dict, stream: Stream) -> None:
    """Text, then a call in pieces, as a server that streams its arguments."""
    await stream.head()
    await stream.text("look: ")
    function = {"name": "read_file", "arguments": ""}
    start = {"index": 0, "id": f"call-{len(body['messages'])}", "function": function}
    await stream.event({"choices": [{"delta": {"tool_calls": [start]}}]})
    for piece in ('{"path": ', '"a.py"}'):
        more = {"index": 0, "function": {"arguments": piece}}
        await stream.event({"choices": [{"delta": {"tool_calls": [more]}}]})
    await stream.event({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    length = len(json.dumps(body["messages"]).split())
    await stream.usage(length, 9, length // 2)
    await stream.done()


def chats(server) -> list[dict]:
    """Bodies of the load, without the probe, in the order of their lengths."""
    return sorted(server.bodies[1:], key=lambda body: len(body["messages"]))


def test_calls_are_sent_back_with_their_results(tmp_path):
    with tiny_server(calls) as server:
        shown = run("agents", "--url", server.url, "--out", tmp_path, *TWO)
    found = read_results(tmp_path)
    assert found.summary.ends == {"ok": 6}
    assert sorted((r.session, r.turn) for r in found.records) == [
        (session, turn) for session in (0, 1) for turn in (1, 2, 3)
    ]
    assert {r.group for r in found.records} == {""}
    first, *_, last = chats(server)
    assert all(len(body["tools"]) == 24 for body in server.bodies[1:])
    assert {json.dumps(body["tools"]) for body in server.bodies[1:]} == {json.dumps(last["tools"])}
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    roles = ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert [m["role"] for m in last["messages"]] == roles
    answer, result = last["messages"][2:4]
    assert answer["content"] == "look: "
    assert answer["tool_calls"][0]["function"]["arguments"] == '{"path": "a.py"}'
    assert result["tool_call_id"] == answer["tool_calls"][0]["id"] == "call-2"
    assert len(result["content"].split()) == 50
    assert "ignore_eos" not in last
    assert last["stream_options"] == {"include_usage": True}
    assert [turn.turn for turn in found.turns] == ["1", "2", "3", "from 2"]
    assert 0.49 < found.turns[-1].cached_share_min <= found.turns[-1].cached_share <= 0.5
    assert found.turns[-1].ttft_to_alone is None
    assert "turns of all sessions" in shown.output
    assert "<h2>Turns</h2>" in (tmp_path / "report.html").read_text()


def test_text_is_followed_by_a_message_and_one_session_may_go_first(tmp_path):
    with tiny_server() as server:
        run("agents", "--url", server.url, "--out", tmp_path, *TWO, "--alone")
    found = read_results(tmp_path)
    first = read_results(tmp_path / "alone")
    assert (first.summary.ends, found.summary.ends) == ({"ok": 3}, {"ok": 6})
    assert len(server.bodies) == 1 + 3 + 6
    systems = [body["messages"][0]["content"] for body in server.bodies[1:]]
    assert len(set(systems[:3])) == len(set(systems[3:])) == 1
    assert systems[0] != systems[3]
    roles = [m["role"] for m in chats(server)[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    ratio = found.turns[-1].ttft_to_alone
    assert ratio is not None
    assert 0.1 < ratio < 10


def test_a_server_without_usage_has_times_and_no_shares(tmp_path):
    async def silent(body: dict, stream: Stream) -> None:
        await stream.head()
        await stream.text("a", "stop")
        await stream.done()

    with tiny_server(silent) as server:
        shown = run("agents", "--url", server.url, "--out", tmp_path, *TWO)
    later = read_results(tmp_path).turns[-1]
    assert later.ttft_s.count == 4
    assert (later.cached_share, later.repeated_share) == (None, None)
    assert "6 responses without usage" in shown.output


def test_a_refused_turn_is_left_out_of_the_next(tmp_path):
    async def full(body: dict, stream: Stream) -> None:
        if sum(m["role"] == "user" for m in body["messages"]) == 2 and len(refused) < 1:
            refused.append(body)
            await stream.head(400, "application/json")
            await stream.raw(b'{"error": {"code": "too_long", "message": "no"}}')
            await stream.end()
        else:
            await words(body, stream)

    refused: list[dict] = []
    with tiny_server(full) as server:
        one = (*SMALL, "--sessions", 1, "--answer-tokens", 3)
        run("agents", "--url", server.url, "--out", tmp_path, *one)
    found = read_results(tmp_path)
    assert [r.end for r in found.records] == ["ok", "http_error", "ok"]
    assert found.summary.errors == {"400 too_long": 1}
    before, after = server.bodies[2]["messages"], server.bodies[3]["messages"]
    assert before[:-1] == after[:-1]
    assert before[-1] != after[-1]
    assert found.turns[1].ttft_s is None


def test_a_server_that_rejects_tools_reads_them_in_the_system_prompt(tmp_path):
    async def plain(body: dict, stream: Stream) -> None:
        if "tools" in body:
            await stream.head(400, "application/json")
            await stream.raw(b'{"error": {"message": "no grammars here"}}')
            await stream.end()
        else:
            await words(body, stream)

    with tiny_server(plain) as server:
        shown = run("agents", "--url", server.url, "--out", tmp_path, *TWO)
    assert "the server rejects tools" in shown.stderr
    found = read_results(tmp_path)
    assert found.summary.ends == {"ok": 6}
    assert found.server["tools"] == "described"
    system = server.bodies[-1]["messages"][0]["content"]
    assert system.count('"type": "function"') == 24


def test_calls_of_a_trace_start_when_those_before_them_have_ended(tmp_path):
    async def slow(body: dict, stream: Stream) -> None:
        """The first of the sub-agents' calls fails, another takes longer than recorded."""
        length = len(body["messages"][-1]["content"].split())
        if length == 130 and not failed:
            failed.append(body)
            await stream.head(500, "application/json")
            await stream.raw(b"{}")
            await stream.end()
            return
        await asyncio.sleep(0.4 if length == 130 else 0.02)
        await words(body, stream)

    failed: list[dict] = []
    trace = written(tmp_path / "spans.jsonl", SPANS)
    with tiny_server(slow) as server:
        load = ("--trace", trace, "--speed", 10, "--url", server.url, "--out", tmp_path / "out")
        run("agents", *load, "--clients", 2)
    first, *forks, second, last = read_results(tmp_path / "out").records
    assert sorted(r.end for r in (first, *forks, second, last)) == ["http_error", *["ok"] * 4]
    for fork in forks:
        assert 0.1 <= fork.intended_s - first.ended_s < 0.2
    [before] = (fork for fork in forks if fork.session == second.session)
    assert 0.1 <= second.intended_s - before.ended_s < 0.2
    assert 0.15 <= last.intended_s - max(r.ended_s for r in (second, *forks)) < 0.25
    sent = server.bodies[1:]
    assert all(body["ignore_eos"] and "tools" not in body for body in sent)
    texts = [body["messages"][0]["content"].split() for body in sent]
    assert texts[-1][:192] == texts[0][:192] != texts[1][:192]


def test_a_trace_excludes_made_sessions_and_is_converted_for_aiperf(tmp_path):
    trace = written(tmp_path / "spans.jsonl", SPANS)
    shown = run("agents", "--trace", trace, "--out", tmp_path / "out", "--turns", 3, code=1)
    assert "remove the options of made ones" in shown.stderr
    run("convert", trace, tmp_path / "aiperf")
    [file] = (tmp_path / "aiperf").iterdir()
    requests = json.loads(file.read_text())["requests"]
    assert [each["type"] for each in requests] == [each["type"] for each in FORK["requests"]]
    assert "exists" in run("convert", trace, tmp_path / "aiperf", code=1).stderr
    trace.write_text("{}")
    assert "neither spans" in run("convert", trace, tmp_path / "new", code=1).stderr
