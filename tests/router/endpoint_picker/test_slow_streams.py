"""A gateway's streams whose request does not come: they would take the places of all others."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from router.endpoint_picker.server import PickerServer
from tests.router.endpoint_picker.test_gateway_stream import headers, part


class Gateway:
    """Sends some messages, and waits then; keeps the replies."""

    def __init__(self, *messages: Any) -> None:
        self.replies: list[Any] = []
        self._messages = messages

    async def messages(self) -> AsyncIterator[Any]:
        for message in self._messages:
            yield message
        await asyncio.sleep(0.3)

    async def write(self, reply: Any) -> None:
        self.replies.append(reply)


async def follow(gateway: Gateway) -> list[int]:
    """Return the status that the observer notes for a stream."""
    noted: list[int] = []
    picked = SimpleNamespace(endpoint="10.0.0.1:8000", follow=id, end=id)
    clients = SimpleNamespace(body_timeout_s=0.05)

    async def pick(_: Any) -> Any:
        return picked

    process = SimpleNamespace(
        settings=SimpleNamespace(clients=clients, max_body_bytes=1000),
        observer=SimpleNamespace(answered=lambda _, status, tenant: noted.append(status)),
        metrics=SimpleNamespace(inc=lambda *_, **labels: None),
    )
    server: Any = SimpleNamespace(_process=process, _picker=SimpleNamespace(pick=pick))
    await PickerServer.Process(server, gateway.messages(), gateway)
    return noted


@pytest.mark.parametrize("messages", [(), (headers(None),), (headers(None), part(b"{"))])
async def test_a_request_that_does_not_come_is_refused(messages: tuple[Any, ...]) -> None:
    """4,096 such streams, which had no end, took the places of all gateways."""
    gateway = Gateway(*messages)
    assert await follow(gateway) == [408]
    assert gateway.replies[-1].immediate_response.status.code == 408


async def test_a_response_may_take_any_time() -> None:
    gateway = Gateway(headers(None), part(b"{}", ends=True))
    assert await follow(gateway) == [499]
    assert not any(reply.HasField("immediate_response") for reply in gateway.replies)


async def test_a_refused_stream_that_its_gateway_keeps_is_ended() -> None:
    gateway = Gateway(headers(None), part(b"x" * 2000))
    assert await follow(gateway) == [413]
