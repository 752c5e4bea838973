"""Other routers of a group: connections of dead ones, and the wait for all to be known."""

import asyncio
import socket
from pathlib import Path

import pytest

from router.frontend.group.member import Member
from router.frontend.group.siblings import Siblings
from tests.router.conftest import until


@pytest.fixture
def member(tmp_path: Path):
    listeners = tuple(socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    yield Member(index=0, count=2, folder=tmp_path, sockets=listeners)
    for listener in listeners:
        listener.close()


async def test_questions_wait_until_each_sibling_was_seen_or_missed(member) -> None:
    siblings = Siblings(member, lambda _: None)
    asked = asyncio.create_task(siblings.alive())
    await asyncio.sleep(0.05)
    assert not asked.done(), "without its metrics the sum would be too small"
    siblings._note(1, True)
    assert await asked == [1]
    siblings._note(1, False)
    assert await siblings.alive() == []
    await siblings.close()


async def test_connections_of_a_dead_sibling_are_accepted_as_the_routers_own(member) -> None:
    """By the function of the server, which limits handshakes and places; then given back."""
    listening: list[int] = []
    closed: list[int] = []

    class Accepting:
        def __init__(self, listener: int) -> None:
            self._listener = listener
            listening.append(listener)

        async def close(self) -> None:
            closed.append(self._listener)

    siblings = Siblings(member, lambda _: None)
    await siblings.start(asyncio.Protocol, Accepting)  # no router is alive at the other position
    other = member.sockets[1].fileno()
    await until(lambda: listening == [other])
    siblings._note(1, True)
    await until(lambda: closed == [other])
    await siblings.close()
