"""A Redis behind one name that moves: the old primary keeps connections.

It becomes a replica, hangs, or still takes writes.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.registry import connection
from baton.registry.redis_store import Registry, RegistryUnavailableError
from baton.registry.types import WorkerRecord
from baton.registry.workers import Presence
from tests.registry.conftest import eventually
from tests.registry.redis_servers import Server, free_ports
from tests.registry.relay import Relay


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[tuple[Relay, Server, Server]]:
    old, new = (Server(tmp_path, port) for port in free_ports(2))
    relay = Relay(old.port)
    for server in (old, new):
        server.wait_up()
    await relay.start()
    yield relay, old, new
    await relay.close()
    for server in (old, new):
        server.kill()


def demote(front: tuple[Relay, Server, Server]) -> None:
    relay, old, new = front
    with old.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", str(new.port))
    relay.to = new.port


SCRIPT = "redis.call('SET', KEYS[1], '1') return 1"


@pytest.mark.parametrize(
    ("command", "atomic"),
    [(("SET", "a", "1"), False), (("SET", "a", "1"), True), (("EVAL", SCRIPT, 1, "a"), False)],
)
async def test_after_a_refusal_the_next_call_finds_the_new_primary(
    front: tuple[Relay, Server, Server], command: tuple[object, ...], atomic: bool
) -> None:
    relay, _, new = front
    registry = Registry(f"redis://127.0.0.1:{relay.port}/0", "test")
    await registry.send(command, ("GET", "a"), atomic=atomic)
    demote(front)
    with pytest.raises(RegistryUnavailableError):
        await registry.send(command, ("GET", "a"), atomic=atomic)
    await registry.send(command, ("GET", "a"), atomic=atomic)
    with new.client() as client:
        assert client.get("a") == "1"
    await registry.close()


async def test_a_worker_registers_with_a_new_primary_that_has_no_record_of_it(
    front: tuple[Relay, Server, Server],
) -> None:
    relay, _, new = front
    registry = Registry(f"redis://127.0.0.1:{relay.port}/0", "test")
    record = WorkerRecord(worker_id="worker-0", role="decode", state="ready", epoch=1)
    presence = Presence(registry, record)
    presence.start()
    await eventually(lambda: presence.connected)
    demote(front)
    with new.client() as client:
        await eventually(lambda: bool(client.exists("baton:{test}:worker:worker-0")))
    await presence.stop()
    await registry.close()


async def test_after_a_silence_no_connection_to_the_old_server_is_used(
    front: tuple[Relay, Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, old, new = front
    monkeypatch.setattr(connection, "_CALL_LIMIT_S", 0.3)
    registry = Registry(f"redis://127.0.0.1:{relay.port}/0", "test")
    await asyncio.gather(*(registry.send(("SET", "a", "old")) for _ in range(4)))
    os.kill(old.process.pid, signal.SIGSTOP)
    relay.to = new.port
    with pytest.raises(RegistryUnavailableError, match=r"^Redis: no answer$"):
        await registry.send(("GET", "a"))
    os.kill(old.process.pid, signal.SIGCONT)
    await asyncio.gather(*(registry.send(("SET", "a", "new")) for _ in range(4)))
    with old.client() as client:
        assert client.get("a") == "old"
    await registry.close()


async def test_connections_are_replaced_in_time(
    front: tuple[Relay, Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    relay, _, new = front
    monkeypatch.setattr(connection, "_AGE_S", 0.2)
    registry = Registry(f"redis://127.0.0.1:{relay.port}/0", "test")
    await registry.send(("SET", "a", "old"))
    relay.to = new.port  # and the old one still takes writes
    await asyncio.sleep(0.3)
    for _ in range(2):
        await registry.send(("SET", "a", "new"))
    with new.client() as client:
        assert client.get("a") == "new"
    await registry.close()
