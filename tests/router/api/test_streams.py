"""Streams that are written past their handlers: the same bytes, and no task to wake per token."""

import asyncio
import json
import re

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.frontend.api.formats.answer_format import TextEvent, data_event, named_event
from router.frontend.api.formats.answer_parts import AnswerPart
from router.frontend.api.formats.openai import AnswerHead, ChatFormat, CompletionFormat
from router.frontend.api.messages import format as messages_format
from router.frontend.api.responses.format import ResponsesFormat
from router.frontend.http.connection import Deliveries
from router.routing.requests.choice import Delta
from tests.router.conftest import MODEL, events_of, until
from tests.router.emulated_worker import Script, answer_token

TEXTS = [
    "a",
    " word",
    '"',
    "\\",
    "\n\t\x00\x1f",
    "é",
    "日本",
    "🙂",
    "\u2028",
    "</script>",
    " " * 300,
]
HI = [{"role": "user", "content": "hi"}]
CALLS = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 40},
    "/v1/completions": {"prompt": ["hi", "ho"], "n": 2, "max_tokens": 40, "echo": True},
    "/v1/messages": {"messages": HI, "max_tokens": 40},
    "/v1/responses": {"input": "hi", "max_output_tokens": 40, "store": False},
}


def formats(model, include_usage: bool) -> list:
    common = {
        "head": AnswerHead("x-1", 1, MODEL, "f"),
        "tokenizer": model.tokenizer,
        "include_usage": include_usage,
    }
    return [ChatFormat(n=3, **common), CompletionFormat(n=3, echoes=["one", "two"], **common)]


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_delta_of_text_is_written_as_the_whole_chunk_would_be(model, include_usage):
    for layout in formats(model, include_usage):
        for place, text in enumerate(TEXTS * 2):
            prompt, delta = place % 2, Delta(place % 3, text=text)
            assert layout.delta(prompt, delta) == data_event(layout.chunk(prompt, delta))


@pytest.mark.parametrize(
    "more",
    [
        {"finish_reason": "stop", "stop_reason": "x"},
        {"reasoning": "hm"},
        {"token_ids": [3]},
        {"text": ""},
    ],
)
def test_a_delta_with_more_than_text_is_written_whole(model, more):
    for layout in formats(model, include_usage=False):
        layout.delta(0, Delta(1, text="before"))
        delta = Delta(1, **({"text": "a"} | more))
        assert not delta.only_text
        assert layout.delta(0, delta) == data_event(layout.chunk(0, delta))


@pytest.mark.parametrize("kind", ["text", "thinking", "call"])
def test_a_delta_of_a_message_is_written_as_the_whole_event_would_be(kind):
    for index, text in enumerate(TEXTS):
        delta = {"delta": messages_format._more(kind, text)}
        whole = messages_format._block_event("content_block_delta", index, delta)
        assert messages_format._delta_event(kind, index).of(text) == whole


@pytest.mark.parametrize("kind", ["text", "thinking", "call"])
def test_a_delta_of_a_response_is_written_as_the_whole_event_would_be(model, kind):
    layout = ResponsesFormat({"id": "resp_1"}, model.tokenizer, {}, None)
    part = AnswerPart(index=3, kind=kind, id="msg_1_out3")
    for text in TEXTS:
        number = layout._number
        event, fields = layout._delta_of(part)
        whole = {"type": event, "sequence_number": number, **fields, "delta": text}
        assert layout._more(part, text, []) == named_event(event, whole)
        assert layout._number == number + 1


def test_a_sample_without_the_text_is_a_fault():
    with pytest.raises(ValueError, match="does not contain"):
        TextEvent(b'data: {"text":"else"}\n\n')


def told(body: str) -> tuple[dict[str, str], list[str]]:
    """The texts of a stream, and all else that it tells, without what differs in each answer."""
    body = re.sub(r"(chatcmpl-|cmpl-|msg_|resp_)[0-9a-f]{32}", "ID", body)
    body = re.sub(r'"(created|created_at|completed_at)":\d+', "", body)
    texts: dict[str, str] = {}  # by choice: how these take turns is not told
    rest = []
    for line in body.splitlines():
        found = re.search(r'"(content|text|delta)":("(?:[^"\\]|\\.)*")', line)
        if found and '"type":"response.output_text.done"' not in line:
            choice = re.search(r'"index":(\d+)', line)
            name = choice[1] if choice else ""
            texts[name] = texts.get(name, "") + json.loads(found[2])
        if not found or "finish_reason" in line:
            rest.append(re.sub(r'"sequence_number":\d+,', "", line))
    return texts, sorted(set(rest))


@pytest.mark.parametrize("path", CALLS)
async def test_a_stream_is_the_same_where_the_server_lends_no_connection(make_fleet, path):
    fleet = await make_fleet({"decode-0": Script(step_s=0)})
    body = {"model": MODEL, "seed": 5, "stream": True} | CALLS[path]
    if path in ("/v1/messages", "/v1/responses"):
        del body["seed"]  # they have none: all that is compared is the shape
    lent = await fleet.http.post(path, json=body)
    app = fleet.server.config.app
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        waited = await client.post(path, json=body)
    assert lent.status_code == waited.status_code == 200
    names = set(lent.headers) - {"date", "transfer-encoding", "connection"}
    assert names == set(waited.headers)
    lent_text, lent_rest = told(lent.text)
    waited_text, waited_rest = told(waited.text)
    assert lent_text
    if "seed" in body:
        assert lent_text == waited_text
    kinds = [[line[:30] for line in rest] for rest in (lent_rest, waited_rest)]
    assert set(kinds[0]) == set(kinds[1])


async def test_a_handler_sleeps_from_the_first_token_to_the_end(make_fleet, monkeypatch):
    """Counted in ASGI's ``send``: it was called for every token."""
    fleet = await make_fleet({"decode-0": Script(step_s=0.005)})
    calls = []
    send = RequestResponseCycle.send

    async def counted(self, message):
        calls.append(message["type"])
        await send(self, message)

    monkeypatch.setattr(RequestResponseCycle, "send", counted)
    response = await fleet.chat(stream=True, max_tokens=64)
    assert len(events_of(response.text)) > 30
    assert len(calls) <= 4  # head, opening, the last token, the end


async def test_all_that_is_here_is_one_pass():
    deliveries, delivered = Deliveries(), []
    passes = [lambda: delivered.append("a"), lambda: delivered.append("b")]
    for deliver in (*passes, passes[0]):  # two frames had tokens for the first
        deliveries.add(deliver)
    assert delivered == []
    await asyncio.sleep(0)
    assert delivered == ["a", "b"]
    deliveries.add(passes[0])
    await asyncio.sleep(0)
    assert delivered == ["a", "b", "a"]


async def test_a_fault_while_a_stream_is_written_ends_this_request_alone(
    make_fleet, monkeypatch, caplog
):
    fleet = await make_fleet({"decode-0": Script(step_s=0.01)})
    of_each = TextEvent.of_each
    broken = fleet.http.stream(
        "POST",
        "/v1/chat/completions",
        json={"model": MODEL, "messages": HI, "max_tokens": 500, "stream": True},
    )
    with pytest.raises(httpx.RemoteProtocolError):
        async with broken as response:
            monkeypatch.setattr(TextEvent, "of_each", lambda self, texts: 1 / 0)
            async for _ in response.aiter_raw():
                pass
    monkeypatch.setattr(TextEvent, "of_each", of_each)
    await until(lambda: fleet.workers["decode-0"].cancels)
    assert any(isinstance((r.exc_info or (0, 0))[1], ZeroDivisionError) for r in caplog.records)
    again = await fleet.chat(stream=True, max_tokens=4)
    assert events_of(again.text)[-1] == "[DONE]"


async def test_a_client_that_leaves_its_stream_ends_the_request(make_fleet):
    fleet = await make_fleet({"decode-0": Script(step_s=0.01)})
    body = {"model": MODEL, "messages": HI, "max_tokens": 5000, "stream": True}
    async with fleet.http.stream("POST", "/v1/chat/completions", json=body) as response:
        await anext(response.aiter_raw())
    await until(lambda: fleet.workers["decode-0"].cancels)
    await until(lambda: fleet.lane.gateway.in_flight == 0)


async def test_a_client_that_leaves_before_the_first_token_ends_the_request(make_fleet, caplog):
    fleet = await make_fleet({"decode-0": Script(prefill_s=30)})
    with pytest.raises(httpx.ReadTimeout):
        await fleet.http.post(
            "/v1/chat/completions",
            json={"model": MODEL, "messages": HI, "stream": True},
            timeout=0.3,
        )
    await until(lambda: fleet.workers["decode-0"].cancels)
    await until(lambda: not fleet.server.server_state.tasks)
    assert not [record for record in caplog.records if "ASGI" in record.getMessage()]


async def test_a_client_that_has_left_before_its_call_is_followed_is_noticed(make_fleet):
    fleet = await make_fleet({"decode-0": Script(prefill_s=30)})
    body = json.dumps({"model": MODEL, "messages": HI, "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    port = int(fleet.url.rpartition(":")[2])
    for _ in range(5):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head % len(body) + body)
        writer.transport.abort()
    await until(lambda: not fleet.server.server_state.connections)
    await until(lambda: not fleet.server.server_state.tasks)
    await until(lambda: fleet.lane.gateway.in_flight == 0)


async def test_the_text_is_whole_whatever_is_written_at_once(make_fleet, model):
    fleet = await make_fleet({"decode-0": Script(step_s=0)})
    response = await fleet.complete(seed=4, max_tokens=600, stream=True)
    events = [event for event in events_of(response.text) if event != "[DONE]"]
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == model.tokenizer.decode([answer_token(4, 0, i) for i in range(600)])
