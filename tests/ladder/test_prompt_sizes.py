"""Prompts of 1,024 to 131,072 tokens on every path, at workers that were idle and at busy ones.

Each answer comes in one attempt (an answer that moves: in two) with the tokens of a colocated one.
No event loop is held for 50 ms of its thread's CPU time: on a busy machine others hold it, too.
No worker keeps a block, and the memory of no process grows with the prompts that it has served.
"""

import asyncio
import contextlib
import gc
import os
from collections.abc import Sequence

import pytest

from baton.config.fleet_file import DEFAULT_MODEL
from baton.model.artifact import resolve_model
from baton.telemetry.process_memory import ROUTER_OBJECTS, collect_rarely
from benchmarks.ladder.tiny_model import write_tiny_model
from tests.ladder.climbers import FIRST, Climber, climbers
from tests.ladder.rungs import (
    CONTEXT_TOKENS,
    HELD_S,
    IDLE_S,
    SIZES,
    VOCABULARY_S,
    anonymous_bytes,
    ladder_fleet,
)
from tests.ladder.watched_worker import LoopHolds
from tests.registry.conftest import redis_server

__all__ = ["redis_server"]

GROWTH_BYTES = 40 << 20  # a pool that stays mapped is 80
EACH_RUN = (FIRST, SIZES[-1])
IDLE = 1  # the salts of prompts
BUSY = 2


@pytest.fixture(scope="module")
def artifact():
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def tiny_model(artifact, tmp_path_factory):
    """A model of real layers, for what emulated engines cannot do."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", artifact, CONTEXT_TOKENS)


@pytest.fixture
def holds(tmp_path, monkeypatch):
    """The folder in which each worker writes for how long its event loop was held.

    A test that is also a router calls `collect_rarely` when its fleets are up, as routers do: a
    full collection of all that pytest and the fleets hold takes a quarter of a second.
    """
    monkeypatch.setenv("BATON_TEST_HOLDS", str(tmp_path))
    thresholds = gc.get_threshold()
    yield tmp_path
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class Ladder:
    """All paths, and for how long each event loop was held."""

    def __init__(self, paths: Sequence[Climber], holds) -> None:
        self.paths = paths
        self.held_s: dict[str, float] = {}
        self._holds = holds

    def paths_of(self, size: int) -> list[Climber]:
        return [path for path in self.paths if size in path.sizes]

    async def seed(self, size: int, salt: int) -> None:
        for path in self.paths_of(size):
            await path.fleet.rest()
            await path.seed(size, salt)

    async def climb_idle(self, size: int) -> None:
        for path in self.paths_of(size):
            await path.fleet.rest()
            await path.step(size, IDLE)
            self._note(path, f"idle {size}")

    async def climb_busy(self, size: int) -> None:
        for path in self.paths_of(size):
            await path.seed(size, BUSY)
            async with path.busy():
                await path.step(size, BUSY)
            self._note(path, f"busy {size}")

    def _note(self, path: Climber, when: str) -> None:
        for worker, held_s in path.fleet.held_s(self._holds).items():
            self.held_s[f"{path.name} {worker} {when}"] = held_s

    async def memory_bytes(self) -> dict[str, int]:
        found = {"router": anonymous_bytes(os.getpid())}
        for path in self.paths:
            for name, held_bytes in (await path.fleet.memory_bytes()).items():
                found[f"{path.name} {name}"] = held_bytes
        return found


def check_held(held_s: dict[str, float]) -> None:
    """No callback held an event loop for too long; names those that did."""
    late = {what: s for what, s in held_s.items() if s >= HELD_S}
    assert not late, late


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(EACH_RUN, marks=pytest.mark.long),
        pytest.param(SIZES, marks=pytest.mark.slow),
    ],
)
async def test_every_size_on_every_path(artifact, tiny_model, redis_server, holds, sizes):
    """If all sizes are tried, a minute without requests comes before each."""
    paths = climbers(sizes, tiny_model)
    async with contextlib.AsyncExitStack() as stack:
        for path in paths:
            fleet = ladder_fleet(
                artifact, redis_server.url, path.name, *path.names, **path.settings
            )
            path.fleet = await stack.enter_async_context(fleet)
        collect_rarely(ROUTER_OBJECTS)
        ladder = Ladder(paths, holds)
        watch = stack.enter_context(LoopHolds().watched())
        await asyncio.sleep(VOCABULARY_S)
        zero = await ladder.memory_bytes()
        for size in sizes:
            await ladder.seed(size, IDLE)
            if sizes == SIZES:
                await asyncio.sleep(IDLE_S)
            await ladder.climb_idle(size)
        before = await ladder.memory_bytes()
        for size in sizes:
            await ladder.climb_busy(size)
        for path in paths:
            await path.fleet.baseline()
        after = await ladder.memory_bytes()
    growth = {name: after[name] - before[name] for name in after}
    assert max(growth.values()) < GROWTH_BYTES, growth
    growth = {name: after[name] - zero[name] for name in after if not name.startswith("tier")}
    assert max(growth.values()) < 2 * GROWTH_BYTES, growth
    check_held({f"router {watch.what}": watch.longest_s, **ladder.held_s})
    golden = paths[0].texts
    for path in paths[1:]:
        assert set(path.texts) == {(size, salt) for size in path.sizes for salt in (IDLE, BUSY)}
        for key, text in path.texts.items():
            whole = path.alone.get(key) or golden[key]
            # A moved answer is longer. What a text ends with may be a part of a character.
            assert text.startswith(whole.rstrip("\ufffd")), (path.name, key)
