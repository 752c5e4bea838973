"""An attached llama-server whose faults a real one has seldom: it is emulated."""

import asyncio
import json
from typing import Any

import pytest

from baton.config.fleet_file import DEFAULT_MODEL
from baton.engine.llama_server.attached import AttachedLlamaServer, read_load
from baton.engine.process import messages
from baton.engine.remote import attached
from baton.engine.remote.attached import ServerFacts
from baton.engine.remote.http import HttpOrigin
from baton.model.artifact import resolve_model
from baton.types import events as ev
from baton.types.errors import UnavailableError
from tests.engine.llama_server.test_protocol import event, spec_of

PROPS = {"total_slots": 1, "model_path": "/m/x.gguf", "build_info": "b1"}
PROPS |= {"default_generation_settings": {"n_ctx": 1024}}


class Stalled:
    """A server that is healthy, and sends one token of each response."""

    def __init__(self) -> None:
        self.slots = [{"id": 0, "is_processing": True}]

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        target = head.split(b" ")[1]
        if target == b"/completion":
            part = event(" a", [100], 1)
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await reader.read()  # the end of the connection
        else:
            pages: dict[bytes, Any] = {b"/props": PROPS, b"/slots": self.slots}
            body = json.dumps(pages.get(target, {})).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()


async def test_a_healthy_server_that_stops_sending_tokens_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The response had no end, and new ones followed it."""
    monkeypatch.setattr(attached, "_POLL_S", 0.02)
    stalled = Stalled()
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
    prompt = b"\x01\0\0\0" * 3
    engine.handle(messages.Submit(request_id="r", prompt_token_ids=prompt, spec=spec_of()))
    async with asyncio.timeout(10):
        why = await engine.broken
    assert "healthy, but computes nothing" in why
    assert [one.error_code for one in sent if isinstance(one, ev.Ended)] == ["unavailable"]
    await engine.close()
    server.close()


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
    server.close()
    assert (first.running, again.running, first.is_whole) == (2, 2, False)
    assert first.work != again.work
