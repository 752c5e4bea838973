"""An attached llama-server whose faults a real one has seldom: it is emulated."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.config.fleet_file import DEFAULT_MODEL
from baton.engine.llama_server.attached import AttachedLlamaServer, read_load
from baton.engine.process import messages
from baton.engine.remote import attached
from baton.engine.remote import engine as remote_engine
from baton.engine.remote.attached import ServerFacts
from baton.engine.remote.http import HttpOrigin
from baton.model.artifact import resolve_model
from baton.types import events as ev
from baton.types.errors import UnavailableError
from tests.engine.llama_server.test_protocol import event, spec_of

PROPS = {"total_slots": 1, "model_path": "/m/x.gguf", "build_info": "b1"}
PROPS |= {"default_generation_settings": {"n_ctx": 1024}}


class Stalled:
    """A server that is healthy, and sends one token of each response.

    Attributes:
        ends: What it sends behind this token.
        cuts: Whether it closes the connection then.
    """

    asked = 0
    ends = b""
    cuts = False

    def __init__(self) -> None:
        self.slots = [{"id": 0, "is_processing": True}]
        self.calls: set[asyncio.Task[None]] = set()

    def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        call = asyncio.ensure_future(self._answer(reader, writer))
        call.add_done_callback(lambda _: writer.close())
        self.calls.add(call)

    async def end(self, server: asyncio.Server) -> None:
        """Close all connections; some had no request."""
        server.close()
        for _ in range(2):  # the last one may just have been accepted
            await asyncio.sleep(0.05)
            await asyncio.gather(*self.calls, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        target = head.split(b" ")[1]
        if target == b"/completion":
            part = event(" a", [100], 1) + self.ends
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            if not self.cuts:
                await reader.read()  # the end of the connection
        else:
            self.slots[0]["id_task"] = self.asked = self.asked + (self.ends != b"")
            pages: dict[bytes, Any] = {b"/props": PROPS, b"/slots": self.slots}
            body = json.dumps(pages.get(target, {})).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))


@contextlib.asynccontextmanager
async def engine_of(stalled: Stalled) -> AsyncIterator[tuple[AttachedLlamaServer, list[Any]]]:
    """Yield an engine of this server, and its reports."""
    server = await asyncio.start_server(stalled.answer, "127.0.0.1", 0)
    origin = HttpOrigin.of_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    facts = ServerFacts(
        engine="llama-server/b1",
        model="x.gguf",
        root="/m/x.gguf",
        max_context_tokens=1024,
        block_tokens=16,
        blocks=64,
    )
    sent: list[Any] = []
    model = resolve_model(DEFAULT_MODEL)
    engine = AttachedLlamaServer(lambda *all_: sent.extend(all_), origin, facts, model)
    async with asyncio.timeout(10):
        yield engine, sent
    await engine.close()
    await stalled.end(server)


def submit(engine: AttachedLlamaServer, name: str = "r") -> None:
    prompt = b"\x01\0\0\0" * 3
    engine.handle(messages.Submit(request_id=name, prompt_token_ids=prompt, spec=spec_of()))


async def ends(sent: list[Any], count: int = 1) -> list[str]:
    """Return the errors with which so many requests have ended."""
    while len(errors := [one.error_code for one in sent if isinstance(one, ev.Ended)]) < count:
        await asyncio.sleep(0.01)
    return errors


async def test_a_healthy_server_that_stops_sending_tokens_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The response had no end, and new ones followed it."""
    monkeypatch.setattr(attached, "_POLL_S", 0.02)
    async with engine_of(Stalled()) as (engine, sent):
        submit(engine)
        assert "healthy, but computes nothing" in await engine.broken
        assert await ends(sent) == ["unavailable"]


async def test_a_finish_reason_ends_a_stream_that_the_server_keeps_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until the deadline it was open, as the server had changing slots."""
    monkeypatch.setattr(attached, "_POLL_S", 0.02)
    monkeypatch.setattr(remote_engine, "_USAGE_S", 0.5)
    stalled = Stalled()
    stalled.ends = event("", [], 1, stop=True, stop_type="limit")
    async with engine_of(stalled) as (engine, sent):
        submit(engine)
        assert await ends(sent) == [""]
        *_, last = (one for one in sent if isinstance(one, ev.Tokens))
        assert last.finish_reason == "length"
        assert not engine.broken.done()


async def test_a_server_leaves_that_cuts_three_streams_one_after_another() -> None:
    """Streams that are cut together have one cause, such as a proxy that restarts."""
    stalled = Stalled()
    stalled.cuts = True
    stalled.ends = b": keep-alive\n\n"
    async with engine_of(stalled) as (engine, sent):
        for number in range(4):
            submit(engine, f"{number}")
        assert await ends(sent, 4) == ["unavailable"] * 4
        for number in range(4, 6):
            assert not engine.broken.done()
            submit(engine, f"{number}")
            await ends(sent, number + 1)
        assert "3 requests in a row failed" in engine.broken.result()


async def test_the_load_is_that_of_the_slots() -> None:
    stalled = Stalled()
    stalled.slots = [{"id": number, "is_processing": number < 2} for number in range(4)]
    server = await asyncio.start_server(stalled.answer, "127.0.0.1", 0)
    origin = HttpOrigin.of_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    first = await read_load(origin)
    stalled.slots[0]["id"] = 9
    again = await read_load(origin)
    stalled.slots = [{"id": 0}]
    with pytest.raises(UnavailableError, match="odd slots"):
        await read_load(origin)
    await stalled.end(server)
    assert (first.running, again.running, first.is_whole) == (2, 2, False)
    assert first.work != again.work
