"""Clients that are slow, leave, or talk nonsense: raw sockets against the server as it runs."""

import asyncio
import contextlib
import json
import socket
import time
from functools import partial

import httpx
import pytest
import uvicorn

from baton.config.clients import ClientLimitsConfig
from router.app import build_app
from router.frontend.http.protocol import server_config
from router.process import Process
from tests.router.conftest import MODEL, events_of, process_of, record_of, until
from tests.router.emulated_worker import EmulatedWorker, Script, answer_token
from tests.router.static_directory import StaticDirectory
from tests.telemetry.values import value_of

LONG_TOKEN = 9225  # a line end and 48 spaces
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


class Server:
    """A router's server with short limits."""

    def __init__(self, router: Process, server: uvicorn.Server) -> None:
        self.router = router
        self.server = server
        listening = server.servers[0].sockets[0]
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)  # or the kernel takes MBs
        self.port = server.servers[0].sockets[0].getsockname()[1]
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=20)

        self.sockets: list[socket.socket] = []

    async def connect(self):
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1024)

    async def send_and_not_read(self, request: bytes) -> None:
        """A connection whose client takes almost nothing, in the kernel neither."""
        sock = socket.socket()
        self.sockets.append(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", self.port))
        await loop.sock_sendall(sock, request)

    def timeouts(self, kind: str) -> float:
        return value_of(self.router.metrics, "baton_client_timeouts", kind=kind)

    @property
    def open(self) -> int:
        return len(self.server.server_state.connections)


@pytest.fixture
async def serve(model):
    async with contextlib.AsyncExitStack() as stack:

        async def make(script: Script | None = None, **limits) -> Server:
            worker = await EmulatedWorker("decode-0", "decode", script).start()
            stack.push_async_callback(worker.stop)
            directory = StaticDirectory([record_of("decode-0", worker.address)])
            clients = ClientLimitsConfig(**limits)
            router = process_of(model, directory, clients=clients, keep_alive_s=0.02)
            app, metrics = build_app(router), router.metrics
            config = server_config(app, metrics, clients, port=0, timeout_graceful_shutdown=1)
            server = uvicorn.Server(config)
            server.capture_signals = contextlib.nullcontext
            task = asyncio.create_task(server.serve())
            await until(lambda: server.started)
            made = Server(router, server)

            async def close() -> None:
                await made.http.aclose()
                for sock in made.sockets:
                    sock.close()
                server.should_exit = True
                await task

            stack.push_async_callback(close)
            return made

        yield make


async def ended(reader: asyncio.StreamReader, limit_s: float = 5.0) -> bytes:
    """What comes until the connection ends."""
    got = b""
    async with asyncio.timeout(limit_s):
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                got += piece
    return got


async def test_a_client_that_does_not_read_a_large_answer_is_dropped(serve):
    """Defect 18: the answer lay in the connection's buffer for ever."""
    router = await serve(write_timeout_s=0.3)
    body = json.dumps({"tokens": [LONG_TOKEN] * 200_000}).encode()  # 10 MB in return
    head = b"POST /detokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    for _ in range(3):
        await router.send_and_not_read(head + body)
    await until(lambda: router.timeouts("write") == 3, 10)
    await until(lambda: router.open == 0)


async def test_a_client_that_does_not_read_its_stream_is_dropped_and_the_request_ends(serve):
    """Defect 14: the handler waited in ``send`` after the request's deadline, for good."""
    router = await serve(Script(step_s=0), write_timeout_s=0.3)
    prompts = ["hi"] * 8
    body = json.dumps(
        {"model": MODEL, "prompt": prompts, "max_tokens": 8000, "stream": True}
    ).encode()
    head = HEAD + b"content-length: %d\r\n\r\n" % len(body)
    await router.send_and_not_read(head + body)
    await until(lambda: router.timeouts("write") == 1, 20)
    await until(lambda: router.open == 0)
    await until(lambda: len(router.server.server_state.tasks) == 0)
    await until(
        lambda: all(a.record.ended for a in router.router.lanes.first.gateway.active.values())
    )


async def test_a_stream_waits_for_a_client_that_is_behind_and_goes_on(serve, model):
    """What came while it did not read stands in one piece; not a token is missing."""
    router = await serve(Script(step_s=0), write_timeout_s=120)  # more than both waits
    prompts, tokens = ["hi"] * 8, 1500
    asked = {"model": MODEL, "prompt": prompts, "max_tokens": tokens, "stream": True, "seed": 1}
    body = json.dumps(asked).encode()
    head = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    await router.send_and_not_read(head + body)
    connections = router.server.server_state.connections
    await until(lambda: any(c.flow and not c.writable for c in connections), 20)
    await until(
        lambda: all(a.record.ended for a in router.router.lanes.first.gateway.active.values()), 20
    )
    got, loop = b"", asyncio.get_running_loop()
    while piece := await loop.sock_recv(router.sockets[0], 1 << 16):
        got += piece
    stream = got.partition(b"\r\n\r\n")[2]
    texts = dict.fromkeys(range(len(prompts)), "")
    while size := int(stream.partition(b"\r\n")[0], 16):  # chunks of HTTP
        stream = stream.partition(b"\r\n")[2]
        for event in events_of(stream[:size].decode()):
            if event != "[DONE]":
                choice = event["choices"][0]
                texts[choice["index"]] += choice["text"]
        stream = stream[size + 2 :]
    expected = model.tokenizer.decode([answer_token(1, 0, i) for i in range(tokens)])
    assert set(texts.values()) == {expected}
    assert router.timeouts("write") == 0


async def test_a_client_that_reads_slowly_but_reads_gets_all(serve):
    router = await serve(write_timeout_s=0.3)
    body = json.dumps({"tokens": [LONG_TOKEN] * 40_000}).encode()
    reader, writer = await router.connect()
    head = b"POST /detokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    got = 0
    while piece := await reader.read(200_000):
        got += len(piece)
        await asyncio.sleep(0.005)
    assert got > 1_900_000
    assert router.timeouts("write") == 0
    writer.close()


async def test_a_body_of_one_byte_now_and_then_is_cut(serve):
    """Defect 18: bodies had no limit of time, and the request's deadline did not cover them."""
    router = await serve(body_timeout_s=0.4)
    reader, writer = await router.connect()
    writer.write(HEAD + b"content-length: 100000\r\n\r\n")
    began_s, answer = time.monotonic(), asyncio.create_task(ended(reader))
    while not answer.done():
        with contextlib.suppress(ConnectionError):
            writer.write(b" ")
            await writer.drain()
        await asyncio.sleep(0.05)
    assert time.monotonic() - began_s < 3
    assert answer.result().startswith(b"HTTP/1.1 408 ")
    assert b'"request_timeout"' in answer.result()
    assert router.timeouts("body") == 1
    await until(lambda: router.open == 0)
    writer.close()


async def test_the_deadline_of_a_request_covers_its_body(serve):
    """Defect 18: ``x-baton-timeout-ms`` began to count when the body had come."""
    router = await serve()
    reader, writer = await router.connect()
    writer.write(HEAD + b"x-baton-timeout-ms: 300\r\ncontent-length: 100000\r\n\r\n{")
    answer = await ended(reader)
    assert answer.startswith(b"HTTP/1.1 504 ")
    assert b"deadline_exceeded" in answer
    writer.close()


async def test_a_body_that_no_handler_reads_is_cut_too(serve):
    """Defect 18: the connection stayed open for as long as a byte came now and then."""
    router = await serve(body_timeout_s=0.2)
    reader, writer = await router.connect()
    writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n ")
    assert (await ended(reader)).startswith(b"HTTP/1.1 200 ")
    assert router.timeouts("body") == 1
    writer.close()


@pytest.mark.parametrize("drip", [b"", b"x-a: b\r\n", b"\r\n"])
async def test_a_header_that_does_not_end_is_cut(serve, drip):
    """Defect 18: connections without a whole header stayed open, 200 of them after 100 s."""
    router = await serve(header_timeout_s=0.4)
    reader, writer = await router.connect()
    if drip == b"x-a: b\r\n":
        writer.write(HEAD)
    began_s, answer = time.monotonic(), asyncio.create_task(ended(reader))
    while not answer.done():
        with contextlib.suppress(ConnectionError):
            writer.write(drip)
            await writer.drain()
        await asyncio.sleep(0.05)
    assert time.monotonic() - began_s < 3
    assert answer.result().startswith(b"HTTP/1.1 408 ")
    assert router.timeouts("header") == 1
    writer.close()


async def test_the_next_header_of_a_kept_connection_has_its_time_too(serve):
    """Defect 18: a byte was enough to end the wait for the next request, and to hold the place."""
    router = await serve(header_timeout_s=0.4)
    reader, writer = await router.connect()
    writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
    await asyncio.sleep(0.6)  # idle is not slow
    writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
    writer.write(b"GET /he")
    assert (await ended(reader)).startswith(b"HTTP/1.1 408 ")
    assert router.timeouts("header") == 1
    writer.close()


async def test_connections_are_limited(serve):
    """Defect 14: there was no limit."""
    router = await serve(max_connections=4)
    held = [await router.connect() for _ in range(4)]
    await until(lambda: router.open == 4)
    reader, writer = await router.connect()
    answer = await ended(reader)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in answer
    assert b"max_connections" in answer
    writer.close()
    assert value_of(router.router.metrics, "baton_connections_refused") == 1
    for _, other in held:
        other.close()
    await until(lambda: router.open == 0)
    assert (await router.http.get("/health/live")).status_code == 200


async def test_a_client_that_leaves_while_it_sends_is_499(serve, caplog):
    """Defect 19: it was counted as our 500, with a traceback each."""
    router = await serve()
    _, writer = await router.connect()
    writer.write(HEAD + b"content-length: 100000\r\n\r\n{")
    await writer.drain()
    await until(lambda: router.server.server_state.tasks)
    await asyncio.sleep(0.05)
    writer.close()
    labels = {"endpoint": "completions", "status": "499", "tenant": "all"}
    value = partial(value_of, router.router.metrics)
    await until(lambda: value("baton_requests", **labels) == 1)
    assert value("baton_rejections", code="client_closed", tenant="all") == 1
    assert value("baton_requests", **(labels | {"status": "500"})) == 0
    assert not [record for record in caplog.records if record.exc_info]


async def test_what_is_not_http_is_refused_in_the_shape_of_all_errors(serve):
    """Defect 24: it got plain text."""
    router = await serve()
    reader, writer = await router.connect()
    writer.write(b"HELLO\r\n\r\n")
    head, _, body = (await ended(reader)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"application/json" in head
    assert json.loads(body)["error"]["code"] == "invalid_request"
    writer.close()


GET = b"GET /ping HTTP/1.1\r\nhost: x\r\n"
CHUNKED = b"POST /ping HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (GET, b"a: b\r\n"),
        (GET + b"a: ", b"b"),
        (GET, b"a"),
        (b"GET /", b"a"),
        (b"", b"\r\n"),
        (CHUNKED + b"0\r\n", b"a: b\r\n"),
        (CHUNKED + b"0\r\na: ", b"b"),
        (CHUNKED + b"1;", b"a"),
    ],
    ids=["many", "long", "name", "path", "empty lines", "trailers", "trailer", "chunk"],
)
async def test_a_header_that_does_not_end_is_cut_by_its_size(serve, begin, piece):
    """60 MiB of small headers took 1.3 GiB of the router's memory, within three seconds."""
    router = await serve()
    reader, writer = await router.connect()
    await reader_is_ended_after(reader, writer, begin, piece * (65536 // len(piece)))
    await until(lambda: router.open == 0)
    assert (await router.http.post("/ping")).status_code == 200


async def reader_is_ended_after(reader, writer, begin: bytes, piece: bytes) -> None:
    """Send until the server ends the connection, which must be within 4 MiB."""
    answer = asyncio.create_task(ended(reader, 30))
    writer.write(begin)
    sent = 0
    with contextlib.suppress(ConnectionError):
        while not answer.done():
            assert sent < 4 * MIB
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
            sent += len(piece)
    got = await answer
    writer.close()
    assert got[:13] in (b"", b"HTTP/1.1 413 ", b"HTTP/1.1 400 ", b"HTTP/1.1 200 ")


async def test_a_body_of_small_chunks_and_many_requests_at_once_are_no_large_headers(serve):
    router = await serve()
    body = json.dumps({"model": MODEL, "prompt": "a" * 9000, "max_tokens": 1, "seed": 1}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    head = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    reader, writer = await router.connect()
    writer.write(head + chunks + b"0\r\n\r\n" + (GET + b"a: " + b"x" * 1200 + b"\r\n\r\n") * 60)
    writer.write(b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    got = await ended(reader, 30)
    writer.close()
    assert got.count(b"HTTP/1.1 200 ") == 62


async def test_a_pipelined_call_is_answered_after_the_one_before(serve, model):
    """Its text was written before its own head as soon as the client had read the first answer."""
    router = await serve(Script(step_s=0.02))
    asked = {"model": MODEL, "prompt": "hi", "max_tokens": 60, "seed": 1}
    alone = (await router.http.post("/v1/completions", json=asked)).json()["choices"][0]["text"]
    calls = b""
    for path, body in (
        (b"/detokenize", {"tokens": [LONG_TOKEN] * 5000}),
        (b"/v1/completions", asked),
    ):
        raw = json.dumps(body).encode()
        head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        calls += head % (path, len(raw)) + raw
    await router.send_and_not_read(calls)
    await asyncio.sleep(0.5)  # the second one runs
    got, loop = b"", asyncio.get_running_loop()
    async with asyncio.timeout(20):
        while b'"usage"' not in got[-500:]:
            got += await loop.sock_recv(router.sockets[-1], 65536)
    head, rest = got.split(b"\r\n\r\n", 1)
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    second, body = rest[length:].split(b"\r\n\r\n", 1)
    assert second.startswith(b"HTTP/1.1 200")
    assert json.loads(body)["choices"][0]["text"] == alone


class Lent:
    """A connection that reports at any time that its client has caught up."""

    writable = True
    has_key = is_reserved = is_crowded = False

    def __init__(self) -> None:
        self.follower = None
        self.written: list[bytes] = []

    def write_piece(self, body: bytes) -> None:
        self.written.append(body)

    def follow(self, follower) -> None:
        self.follower = follower

    def unfollow(self, follower) -> None:
        self.follower = None


async def test_text_behind_prompt_logprobs_keeps_its_order(serve):
    """Newer text overtook the text that the handler waited to write."""
    router = await serve(Script(step_s=0.004))
    asked = {"model": MODEL, "prompt": [500] * 8, "max_tokens": 60, "seed": 1, "stream": True}
    body = json.dumps({**asked, "prompt_logprobs": 1}).encode()
    right = await router.http.post("/v1/completions", content=body)
    lent, got = Lent(), b""

    async def receive() -> dict:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict) -> None:
        nonlocal got
        for _ in range(3):  # the client is behind, and catches up
            lent.follower.on_writable()
            await asyncio.sleep(0.01)
        got += message.get("body", b"")

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "extensions": {"baton.connection": lent},
    }
    await router.server.config.loaded_app(scope, receive, send)
    assert lent.written == []
    texts = [
        "".join(c["text"] for e in events_of(raw) if e != "[DONE]" for c in e.get("choices", ()))
        for raw in (right.text, got.decode())
    ]
    assert texts[0] == texts[1]
    assert texts[0]
