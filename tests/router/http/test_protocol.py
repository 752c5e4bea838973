"""HTTP as clients send it: HTTP/1.0, offers of other protocols, headers that must not be."""

import asyncio
import json

import pytest

from router.frontend.http.protocol import MAX_HEADER_BYTES
from tests.router.api.test_slow_clients import ended, serve
from tests.router.conftest import MODEL, events_of
from tests.router.emulated_worker import Script

__all__ = ["serve"]

ASKED = {"model": MODEL, "prompt": "hi", "max_tokens": 3, "seed": 1}
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
OFFERS = (
    H2C,
    b"connection: upgrade\r\nupgrade: TLS/1.0\r\n",
    b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nsec-websocket-version: 13\r\n",
    b"upgrade: a\r\nconnection: x\r\nupgrade: b\r\nconnection: Upgrade\r\n",
)


async def answers(router, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Everything that comes until the router closes the connection."""
    reader, writer = await router.connect()
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(pause_s)
    got = await ended(reader, 20)
    writer.close()
    return got


def call(more: bytes = b"", body: bytes = b"", path: bytes = b"/v1/completions") -> bytes:
    length = b"content-length: %d\r\n" % len(body) if body else b""
    method = b"POST" if body else b"GET"
    return b"%b %b HTTP/1.1\r\nhost: x\r\n%b%b\r\n%b" % (method, path, length, more, body)


LAST = call(b"connection: close\r\n", path=b"/version")


@pytest.mark.parametrize("offer", OFFERS)
async def test_an_offer_of_another_protocol_is_ignored(serve, offer):
    """The parser stopped after the header: Java's client and `curl --http2` lost their bodies."""
    router = await serve(Script())
    body = json.dumps(ASKED).encode()
    right = (await router.http.post("/v1/completions", json=ASKED)).json()["choices"]
    chunked = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    with_chunks = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
    once = b"".join(
        (
            call(offer, path=b"/health/live"),
            call(offer, body),
            with_chunks + offer + b"\r\n" + chunked,
            LAST,
        )
    )
    for pieces in ([once], [once[at : at + 50] for at in range(0, len(once), 50)]):
        got = await answers(router, *pieces)
        assert got.count(b"HTTP/1.1 200 OK") == 4, got
        found = [line for line in got.split(b"\r\n") if line.startswith(b'{"id"')]
        assert [json.loads(line[: line.rindex(b"}") + 1])["choices"] for line in found] == [
            right
        ] * 2
    old = call(offer + b"connection: close\r\n", body).replace(b"HTTP/1.1", b"HTTP/1.0")
    assert (await answers(router, old)).startswith(b"HTTP/1.1 200 OK")


async def test_http_2_is_refused_and_older_versions_end_with_the_connection(serve):
    router = await serve()
    assert (await answers(router, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")).startswith(b"HTTP/1.1 400")
    got = await answers(router, b"GET /version HTTP/0.9\r\nconnection: keep-alive\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in got


async def test_connect_is_no_offer(serve):
    router = await serve()
    for target in (b"x:80", b"/health", b"http://x/"):
        head = b"CONNECT %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % target
        assert (await answers(router, head)).startswith((b"HTTP/1.1 400", b"HTTP/1.1 405")), target


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (b"", "host"),
        (b"host: x\r\nHost: y\r\n", "host"),
        (b"host: x\r\nhost: x\r\n", "host"),
        (b"host: x\r\nauthorization: Bearer a\r\nauthorization: Bearer b\r\n", "authorization"),
        (b"host: x\r\nx-api-key: a\r\nx-api-key: a\r\n", "x-api-key"),
        (b"host: x\r\nx-baton-tenant: a\r\nX-Baton-Tenant: b\r\n", "x-baton-tenant"),
    ],
)
async def test_fields_that_count_once_are_refused_twice(serve, fields, param):
    router = await serve()
    first = call(path=b"/version")
    got = await answers(router, first + b"GET /version HTTP/1.1\r\n" + fields + b"\r\n" + LAST)
    assert got.startswith(b"HTTP/1.1 200 OK")  # the one before has its answer
    assert got.count(b"HTTP/1.1 ") == 2
    assert b"HTTP/1.1 400 Bad Request" in got
    assert json.loads(got[got.rindex(b'{"error') :])["error"]["param"] == param


@pytest.mark.parametrize("lines", [b"gzip, chunked", b"gzip\r\ntransfer-encoding: chunked"])
async def test_bodies_in_another_coding_than_chunks_are_refused(serve, lines):
    """The chunks were read as the body, in whichever coding their content is."""
    router = await serve(Script())
    body = json.dumps(ASKED).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: "
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    got = await answers(router, head + lines + b"\r\n\r\n" + chunks)
    assert got.startswith(b"HTTP/1.1 400") and b'"param":"transfer-encoding"' in got
    taken = head + b"Chunked\r\nconnection: close\r\n\r\n" + chunks
    assert (await answers(router, taken)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("pieces", [1, 40])
async def test_the_limit_of_the_header_is_exact(serve, more, pieces):
    """A header that came in one read was not counted."""
    router = await serve()
    head = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-long: "
    head += b"x" * (MAX_HEADER_BYTES + more - len(head) - 4) + b"\r\n\r\n"
    size = len(head) // pieces + 1
    got = await answers(router, *(head[at : at + size] for at in range(0, len(head), size)))
    assert got.startswith(b"HTTP/1.1 413" if more else b"HTTP/1.1 200"), got[:200]


async def test_zeros_may_precede_the_length_of_a_body(serve):
    router = await serve(Script())
    asked = call(b"connection: close\r\n", json.dumps(ASKED).encode())
    padded = asked.replace(b"content-length: ", b"content-length: " + b"0" * 5000)
    assert (await answers(router, padded)).startswith(b"HTTP/1.1 200")


async def test_no_location_is_made_of_what_the_client_sends(serve):
    """A slash at the end led to http:// and to any host, with the prompt and the key."""
    router = await serve()
    for path in (
        "/v1/chat/completions/",
        "/fleet/",
        "/health/",
        "/v1/models/x/",
    ):
        for method in ("GET", "POST"):
            answer = await router.http.request(method, path, headers={"host": "evil"}, json={})
            assert answer.status_code in (403, 404, 405), path
            assert "location" not in answer.headers


async def test_http_1_0_gets_its_body_without_chunks(serve):
    """HTTP/1.0 has no chunks: clients took the sizes for text."""
    router = await serve(Script())
    asked = {**ASKED, "stream": True}
    new = await router.http.post("/v1/completions", json=asked)
    body = json.dumps(asked).encode()
    for host, kept in ((b"host: x\r\n", b""), (b"", b"connection: keep-alive\r\n")):
        reader, writer = await router.connect()
        head = b"POST /v1/completions HTTP/1.0\r\n%b%bcontent-length: %d\r\n\r\n"
        asks = kept + b"expect: 100-continue\r\n"
        writer.write(head % (host, asks, len(body)) + body)
        got_head, got = (await ended(reader)).split(b"\r\n\r\n", 1)
        writer.close()
        assert b"transfer-encoding" not in got_head.lower()
        assert b"connection: close" in got_head.lower()
        texts = [
            [c["text"] for e in events_of(raw) if e != "[DONE]" for c in e["choices"]]
            for raw in (new.text, got.decode())
        ]
        assert texts[0] == texts[1]
        assert got_head.startswith(b"HTTP/1.1 200")
    for path in (b"/v1/models", b"/page/page.js", b"/nowhere"):
        reader, writer = await router.connect()
        writer.write(b"GET %b HTTP/1.0\r\n\r\n" % path)
        got_head, got = (await ended(reader)).split(b"\r\n\r\n", 1)
        writer.close()
        assert b"content-length: %d\r\n" % len(got) in got_head.lower() + b"\r\n"


async def test_a_client_that_pipelines_without_end_is_cut_off(serve):
    """One connection without a key took gigabytes: 19 MB of requests became 1.3 GB."""
    router = await serve(Script())
    one = call(path=b"/version")
    assert (await answers(router, one * 60, LAST)).count(b"HTTP/1.1 200") == 61
    for many in (one * 200, call(H2C, path=b"/version") * 200):
        assert b"HTTP/1.1" not in await answers(router, many)
    assert (await router.http.get("/version")).status_code == 200
