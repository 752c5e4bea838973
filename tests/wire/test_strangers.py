"""A worker's gRPC port takes next to nothing from callers without the fleet token."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from batonpb import decode_pb2_grpc

from baton.wire.fleet_token import FleetToken, TokenInterceptor
from baton.wire.grpc_options import NO_PROXY, SERVER_OPTIONS, listen

MESSAGE_BYTES = 15 << 20
SUBMIT, SERVE = "/baton.v1.Decode/Submit", "/baton.v1.Decode/Serve"


@contextlib.asynccontextmanager
async def served(**options: int) -> AsyncIterator[int]:
    server = grpc.aio.server(
        interceptors=[TokenInterceptor(FleetToken.of("", "secret"))],
        options=[*{**dict(SERVER_OPTIONS), **options}.items()],
    )
    decode_pb2_grpc.add_DecodeServicer_to_server(decode_pb2_grpc.DecodeServicer(), server)
    port = listen(server, "127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


class Passed:
    """A port that passes everything on to another, and the bytes that went there."""

    def __init__(self, to_port: int) -> None:
        self.to_port = to_port
        self.size_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "Passed":
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks)

    def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(asyncio.create_task(self._pass(reader, writer)))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, onward = await asyncio.open_connection("127.0.0.1", self.to_port)
        self._writers += (onward, writer)
        await asyncio.gather(self._copy(reader, onward, 1), self._copy(back, writer, 0))

    async def _copy(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, counted: int
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                self.size_bytes += counted * len(data)
                sink.write(data)
                await sink.drain()
        sink.close()
        with contextlib.suppress(OSError):
            await sink.wait_closed()


@pytest.mark.parametrize("method", [SUBMIT, SERVE, "/baton.v1.Decode/Nothing"])
@pytest.mark.parametrize("metadata", [(), FleetToken("wrong").metadata])
async def test_messages_are_refused_unread(method: str, metadata: Any) -> None:
    sending = [("grpc.max_send_message_length", 2 * MESSAGE_BYTES), NO_PROXY]
    message = bytes(MESSAGE_BYTES)
    async with served() as server, Passed(server) as passed:
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{passed.port}", options=sending
        ) as channel:
            if method == SERVE:
                call = channel.stream_stream(method)(iter([message]), metadata=metadata, timeout=20)
            else:
                call = channel.unary_unary(method)(message, metadata=metadata, timeout=20)
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
    assert passed.size_bytes < 128 << 10


@pytest.mark.parametrize("words", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
async def test_a_connection_without_a_handshake_is_closed(words: bytes) -> None:
    assert dict(SERVER_OPTIONS)["grpc.server_handshake_timeout_ms"] <= 10_000
    async with served(**{"grpc.server_handshake_timeout_ms": 300}) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(words)
        began_s = time.monotonic()
        async with asyncio.timeout(20):
            await reader.read()
        assert time.monotonic() - began_s < 10
        writer.close()
