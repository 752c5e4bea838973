"""HTTP client of engines, against real servers."""

import asyncio
import contextlib
import ssl
from datetime import timedelta
from pathlib import Path

import pytest

from baton.engine.remote import http
from baton.engine.remote.http import HttpOrigin
from baton.types.errors import UnavailableError
from fleet.cli import certificate_authority as authority
from tests.engine.vllm.test_engine import HEAD, chunk


async def test_a_request_larger_than_the_sockets_buffer_arrives_whole(tmp_path: Path) -> None:
    """A prompt of 128 k tokens has about 800 KB."""
    path = str(tmp_path / "http")
    origin = HttpOrigin.of_socket(path)
    body = b"7" * 4_000_000
    request = origin.request_bytes("POST", "/x", body)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)  # meanwhile the buffer fills
        arrived = await reader.readexactly(len(request))
        writer.write(HEAD + chunk(b"%d" % (arrived == request)) + b"0\r\n\r\n")
        writer.close()

    server = await asyncio.start_unix_server(answer, path)
    parts: list[bytes] = []
    exchange = await origin.begin("POST", "/x", body, parts.append)
    assert await exchange.done
    assert parts == [b"1"]
    server.close()


async def test_a_head_without_an_end_is_cut_off() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b"X-Name: " + b"x" * 65_536 + b"\r\n")
                await writer.drain()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    origin = HttpOrigin.of_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert await origin.ask("GET", "/health", 10.0) == (0, False, b"")
    server.close()


async def test_a_key_goes_over_tls_to_one_address_of_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.make(tmp_path, "baton", ["localhost"], timedelta(days=1))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    http.trusted_context.cache_clear()
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(HEAD + chunk(b"yes") + b"0\r\n\r\n")
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "router.pem", tmp_path / "router.key")
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    origin = HttpOrigin.of_url(f"https://localhost:{port}/vllm/", "secret", "127.0.0.1")
    assert await origin.fetch("GET", "/health", 10.0) == b"yes"
    assert heads[0].startswith(b"GET /vllm/health HTTP/1.1\r\n")
    assert b"Authorization: Bearer secret\r\n" in heads[0]
    assert "secret" not in repr(origin)
    stranger = HttpOrigin.of_url(f"https://other.host:{port}", "secret", "127.0.0.1")
    with pytest.raises(UnavailableError, match="certificate"):
        await stranger.fetch("GET", "/health", 10.0)
    assert len(heads) == 1
    server.close()
    http.trusted_context.cache_clear()
