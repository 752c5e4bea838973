"""A small real HTTP server in a thread, that answers as the test wants it to."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import MappingProxyType

Reply = Callable[[dict, "Stream"], Awaitable[None]]


class Stream:
    """The answer to one request."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def head(
        self,
        status: int = 200,
        kind: str = "text/event-stream",
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._writer.write(
            f"HTTP/1.1 {status} Some\r\ncontent-type: {kind}\r\nx-request-id: r-1\r\n{more}"
            "transfer-encoding: chunked\r\n\r\n".encode()
        )
        await self._writer.drain()

    async def raw(self, data: bytes) -> None:
        self._writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self._writer.drain()

    async def event(self, payload: object) -> None:
        await self.raw(b"data: " + json.dumps(payload).encode() + b"\n\n")

    async def text(self, text: str, finish: str | None = None) -> None:
        await self.event({"choices": [{"delta": {"content": text}, "finish_reason": finish}]})

    async def usage(self, prompt: int, answer: int, cached: int = 0) -> None:
        details = {"cached_tokens": cached}
        counts = {"prompt_tokens": prompt, "completion_tokens": answer}
        await self.event({"choices": [], "usage": {**counts, "prompt_tokens_details": details}})

    async def done(self) -> None:
        await self.raw(b"data: [DONE]\n\n")
        await self.end()

    async def end(self) -> None:
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()


async def words(body: dict, stream: Stream) -> None:
    """As many words as asked for, 5 ms apart."""
    await stream.head()
    for number in range(body["max_tokens"]):
        await stream.text(f"w{number} ", "length" if number + 1 == body["max_tokens"] else None)
        await asyncio.sleep(0.005)
    text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    await stream.usage(len(text.split()), body["max_tokens"], 3)
    await stream.done()


class TinyServer:
    """Its address, the bodies it was sent, and when they came (monotonic clock)."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.bodies: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.came_s: list[float] = []
        self.url = ""
        self.emulated: str | None = None  # as a Baton with emulated workers says it

    async def serve(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        started.set()
        async with server:
            await self._stop.wait()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._answer(reader, writer)
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        if lines[0].startswith("GET"):
            model = {"id": "tiny", "emulated": self.emulated}
            listed = json.dumps({"data": [model]} if "/v1/models" in lines[0] else {}).encode()
            status = 200 if "/v1/models" in lines[0] else 404
            head = (
                f"HTTP/1.1 {status} X\r\ncontent-length: {len(listed)}\r\nconnection: close\r\n\r\n"
            )
            writer.write(head.encode())
            writer.write(listed)
            await writer.drain()
        else:
            body = json.loads(raw)
            self.came_s.append(time.monotonic())
            self.bodies.append(body)
            self.headers.append(headers)
            await self.reply(body, Stream(writer))


@contextlib.contextmanager
def tiny_server(reply: Reply = words) -> Iterator[TinyServer]:
    server = TinyServer(reply)
    started = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(started)))
    thread.start()
    started.wait(5)
    try:
        yield server
    finally:
        server.stop()
        thread.join(10)
