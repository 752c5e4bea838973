"""HTTP client of engines, against real servers."""

import asyncio
from pathlib import Path

from baton.engine.remote.http import HttpOrigin
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
