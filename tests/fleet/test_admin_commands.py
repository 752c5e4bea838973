"""Waits of the controller before it answers an order."""

import asyncio
import time

import pytest

from baton.registry.router_demands import RouterDemand
from fleet.pools import admin_commands as orders
from fleet.pools.admin_commands import routers_behind
from fleet.private_logs import logs_of


class Routers:
    """Routers by name: the last turn of each, and whether it reports."""

    def __init__(self, **routers: tuple[int, bool]) -> None:
        self.routers = routers
        self._beat = 0

    async def read(self) -> dict[str, RouterDemand]:
        self._beat += 1
        return {
            name: RouterDemand(beat=self._beat if reports else 1, turn=turn)
            for name, (turn, reports) in self.routers.items()
        }


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "_SILENT_S", 0.2)
    monkeypatch.setattr(orders, "_FOLLOW_LIMIT_S", 0.6)
    monkeypatch.setattr(orders, "_FOLLOW_POLL_S", 0.01)


async def test_a_turn_is_done_when_every_live_router_uses_it() -> None:
    routers = Routers(a=(4, True), b=(3, True))
    waiting = asyncio.create_task(routers_behind(routers, 4))
    await asyncio.sleep(0.3)
    assert not waiting.done(), "b reports, and is behind"
    routers.routers["b"] = (4, True)
    assert await waiting == []


async def test_a_router_that_is_gone_is_not_waited_for_longer_than_its_silence() -> None:
    began_s = time.monotonic()
    assert await routers_behind(Routers(a=(4, True), gone=(1, False)), 4) == []
    assert 0.2 <= time.monotonic() - began_s < 0.5


async def test_a_router_that_does_not_follow_is_named() -> None:
    assert await routers_behind(Routers(a=(4, True), b=(1, True)), 4) == ["b"]


async def test_without_routers_nobody_is_waited_for() -> None:
    assert await routers_behind(Routers(), 4) == []


def test_the_logs_of_a_worker_are_not_those_of_a_longer_number(tmp_path) -> None:
    for name in (
        "worker-1.log",
        "worker-1.engine.log",
        "worker-10.log",
        "router.log",
        "router-1.log",
    ):
        (tmp_path / name).touch()
    assert [path.name for path in logs_of("worker-1", tmp_path)] == [
        "worker-1.engine.log",
        "worker-1.log",
    ]
    assert [path.name for path in logs_of("router", tmp_path)] == ["router-1.log", "router.log"]
    assert len(logs_of("", tmp_path)) == 5
