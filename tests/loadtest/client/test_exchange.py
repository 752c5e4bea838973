"""Every way a request can end has its name, and times are those of the server."""

import asyncio
import socket

import pytest

from loadtest.client.exchange import Exchanged, Target, exchange
from tests.loadtest.tiny_server import Reply, Stream, tiny_server, words

BODY = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "a b"}]}


async def ask(reply: Reply, **options) -> Exchanged:
    with tiny_server(reply) as server:
        target = Target.of(server.url, "/v1/chat/completions", {})
        arguments = {"headers": {}, "timeout_s": 5.0, "keep_text": True, **options}
        return await exchange(target, BODY, **arguments)


async def test_an_answer_comes_whole_with_what_the_server_counted():
    found = await ask(words)
    assert (found.end, found.detail, found.reader.status) == ("ok", "", 200)
    assert found.reader.text == "w0 w1 w2 "
    assert len(found.reader.chunk_s) == 3
    assert (found.reader.usage.prompt_tokens, found.reader.usage.completion_tokens) == (2, 3)
    assert found.reader.usage.prompt_tokens_details.cached_tokens == 3
    assert (found.reader.finish_reason, found.reader.request_id) == ("length", "r-1")


async def test_a_server_that_stalls_a_second_is_seen_to_stall_a_second():
    async def reply(body: dict, stream: Stream) -> None:
        await stream.head()
        await stream.event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(1.0)
        await stream.text("a")
        await asyncio.sleep(0.5)
        await stream.text("b", "stop")
        await stream.done()

    found = await ask(reply)
    first, second = found.reader.chunk_s  # the role alone is no token
    assert 1.0 <= first - found.sent_s < 1.9
    assert 1.5 <= second - found.sent_s < 2.4


async def test_a_refusal_says_its_status_and_code():
    async def reply(body: dict, stream: Stream) -> None:
        await stream.head(429, "application/json")
        await stream.raw(b'{"error": {"code": "queue_full", "message": "256 requests wait"}}')

    found = await ask(reply)
    assert (found.end, found.reader.status) == ("http_error", 429)
    assert found.detail == "queue_full: 256 requests wait"


async def test_an_error_in_the_stream_is_not_a_broken_stream():
    async def reply(body: dict, stream: Stream) -> None:
        await stream.head()
        await stream.text("a")
        await stream.event({"error": {"code": "worker_lost", "message": "decode-0 is gone"}})
        await stream.done()

    found = await ask(reply)
    assert (found.end, found.detail) == ("stream_error", "worker_lost: decode-0 is gone")


@pytest.mark.parametrize("finish", [None, "stop"])
async def test_a_stream_that_is_cut_is_broken_even_after_its_last_token(finish):
    async def reply(body: dict, stream: Stream) -> None:
        await stream.head()
        await stream.text("a", finish)

    assert (await ask(reply)).end == "broken_stream"


async def test_what_is_no_json_breaks_the_stream():
    async def reply(body: dict, stream: Stream) -> None:
        await stream.head()
        await stream.raw(b"data: {oops\n\n")

    found = await ask(reply)
    assert found.end == "broken_stream"
    assert "unreadable event" in found.detail


async def test_a_server_that_closes_without_a_word():
    async def reply(body: dict, stream: Stream) -> None:
        return

    assert (await ask(reply)).end == "connection"


async def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        target = Target.of(f"http://127.0.0.1:{taken.getsockname()[1]}", "/v1/completions", {})
        found = await exchange(target, BODY, headers={}, timeout_s=5.0)
    assert found.end == "connection"
    assert found.connected_s is None


async def test_the_client_gives_up_or_hangs_up_as_told():
    async def reply(body: dict, stream: Stream) -> None:
        await stream.head()
        await asyncio.sleep(2.0)

    assert (await ask(reply, timeout_s=0.2)).end == "timeout"
    found = await ask(reply, abort_after_s=0.2)
    assert found.end == "aborted"
    assert 0.2 <= found.ended_s - found.sent_s < 0.6


async def test_events_may_arrive_in_any_pieces():
    async def reply(body: dict, stream: Stream) -> None:
        await stream.head()
        data = b'data: {"choices": [{"text": "\xc3\xa9", "finish_reason": "stop"}]}\r\n\r\n'
        for byte in data:
            await stream.raw(bytes([byte]))
        await stream.done()

    found = await ask(reply)
    assert (found.end, found.reader.text) == ("ok", "é")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ValueError, match="http"):
        Target.of(url, "/", {})
