"""Deltas of an answer, split into parts; a client that is slow gets several steps in one delta."""

import pytest

from baton.text.tool_calls import CallDelta
from router.frontend.api.formats.answer_parts import AnswerParts, Begin, End, More
from router.routing.requests.choice import Delta, ShownLogprob
from tests.router.conftest import MODEL, events_of
from tests.router.emulated_worker import Script


def test_text_behind_a_call_does_not_tear_it() -> None:
    answer = AnswerParts(lambda kind, _: kind, {"shell"})
    events = answer.push(Delta(0, calls=[CallDelta(0, "c0", "f", '{"a": "')]))
    events += answer.push(
        Delta(
            0,
            text="Done",
            calls=[CallDelta(0, None, None, 'xyz"}'), CallDelta(1, "c1", "shell", '{"input": "l')],
        )
    )
    events += answer.push(Delta(0, text="!", calls=[CallDelta(1, None, None, 's"}')]))
    events += answer.finish()
    assert [(part.kind, part.name, part.text) for part in answer.parts] == [
        ("call", "f", '{"a": "xyz"}'),
        ("text", "", "Done"),
        ("call", "shell", "ls"),
        ("text", "", "!"),
    ]
    kinds = [type(event) for event in events if not isinstance(event, More)]
    assert kinds == [Begin, End] * 4


def shown_logprob(token_id: int) -> ShownLogprob:
    return ShownLogprob(token_id, -1.0, (), 0)


def seen(steps: list[Delta]) -> list[tuple]:
    answer = AnswerParts(lambda kind, _: kind)
    events = [event for step in steps for event in answer.push(step)] + answer.finish()
    told = [entry for event in events if isinstance(event, More) for entry in event.logprobs]
    assert told == [entry for part in answer.parts for entry in part.logprobs]
    return [
        (part.kind, part.name, part.text, [entry.token_id for entry in part.logprobs])
        for part in answer.parts
    ]


def test_one_delta_has_the_order_of_its_steps() -> None:
    """Text behind a call stays there, and each token without text keeps its log-probability."""
    one, two, three, four, five, six = map(shown_logprob, range(6))
    steps = [
        Delta(0, logprobs=[one]),
        Delta(0, text="é", logprobs=[two]),
        Delta(0, logprobs=[three]),
        Delta(0, calls=[CallDelta(0, "c0", "f", "{", 0, 0)], logprobs=[four]),
        Delta(0, calls=[CallDelta(0, None, None, "}", 0, 0)]),
        Delta(0, text="then", logprobs=[five]),
        Delta(0, calls=[CallDelta(1, "c1", "g", "{}", 0, 0)], finish_reason="length"),
    ]
    calls = [CallDelta(0, "c0", "f", "{}", 1, 3), CallDelta(1, "c1", "g", "{}", 5, 5)]
    merged = Delta(0, text="éthen", calls=calls, logprobs=[one, two, three, four, five])
    merged.finish_reason = "length"
    expected = [
        ("text", "", "é", [0, 1, 2]),
        ("call", "f", "{}", []),
        ("text", "", "then", [3, 4]),
        ("call", "g", "{}", []),
    ]
    assert seen(steps) == seen([merged]) == expected
    cut = [Delta(0, text="a", logprobs=[five]), Delta(0, logprobs=[six], finish_reason="length")]
    assert seen(cut) == [("text", "", "a", [4, 5])]


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
WRITTEN = {
    "text between and behind calls": (f"One. {CALL} Two. {CALL} Three 😀", 0, "stop"),
    "a part of a character at the end": ("a 😀", 1, "length"),
}


@pytest.mark.parametrize(("text", "cut", "reason"), WRITTEN.values(), ids=WRITTEN)
async def test_an_answer_in_one_piece_has_the_order_and_the_tokens_of_its_stream(
    make_fleet, model, text, cut, reason
) -> None:
    ids = model.tokenizer.encode(text)
    ids = ids[: len(ids) - cut]
    script = Script(answer=ids, stop_token=2 if reason == "stop" else None)
    fleet = await make_fleet({"decode-0": script})
    told = {"model": MODEL, "input": "hi", "max_output_tokens": len(ids) + (reason == "stop")}
    body = {
        **told,
        "tools": [{"type": "function", **FUNCTION}],
        "include": ["message.output_text.logprobs"],
        "store": False,
    }
    whole = (await fleet.http.post("/v1/responses", json=body)).json()["output"]
    streamed = await fleet.http.post("/v1/responses", json={**body, "stream": True})
    events = events_of(streamed.text)
    final = events[-1]["response"]["output"]
    assert [bare(item) for item in final] == [bare(item) for item in whole]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    done = [event for event in events if event["type"] == "response.output_text.done"]
    parts = [item["content"][0] for item in whole if item["type"] == "message"]
    told_count = sum(len(part["logprobs"]) for part in parts)
    assert sum(len(event["logprobs"]) for event in deltas) == told_count
    assert [len(event["logprobs"]) for event in done] == [len(part["logprobs"]) for part in parts]
    if cut:
        assert told_count == len(ids)
        return
    kinds = ["message", "function_call", "message", "function_call", "message"]
    assert [item["type"] for item in whole] == kinds
    tools = [{"name": "f", "input_schema": FUNCTION["parameters"]}]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    answer = await fleet.http.post("/v1/messages", json={**asked, "max_tokens": len(ids) + 1})
    blocks = [(b["type"], b.get("text", "").strip()) for b in answer.json()["content"]]
    assert blocks == [
        ("text", "One."),
        ("tool_use", ""),
        ("text", "Two."),
        ("tool_use", ""),
        ("text", "Three 😀"),
    ]


def bare(item: dict) -> dict:
    """An item without its random ids."""
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


async def test_a_call_that_is_cut_in_its_head_is_no_content_of_a_chat(make_fleet, model) -> None:
    ids = model.tokenizer.encode(CALL + '\n<tool_call>\n{"name": "')
    fleet = await make_fleet({"decode-0": Script(answer=ids)})
    for choice in ("required", {"type": "function", "function": {"name": "f"}}, "auto"):
        body = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": choice}
        for stream in (False, True):
            answer = await fleet.chat(**body, max_tokens=len(ids), stream=stream)
            if stream:
                chunks = [event["choices"][0] for event in events_of(answer.text)[:-1]]
                content = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
                assert (content, chunks[-1]["finish_reason"]) == ("", "length")
                continue
            [told] = answer.json()["choices"]
            assert told["message"]["content"] is None
            assert len(told["message"]["tool_calls"]) == 1
            assert told["finish_reason"] == "length"
