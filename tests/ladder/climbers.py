"""The paths of the ladder: how a prompt is made to go each of them, and the proof that it did."""

import asyncio
import contextlib
import signal
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.engine.settings import KvTierSettings
from baton.types.geometry import BLOCK_TOKENS
from tests.ladder.rungs import CONTEXT_TOKENS, SIZES, Answer, LadderFleet
from tests.router.conftest import until

FIRST = SIZES[2]  # the first that goes by a call of its own: it exceeds 64 KiB
OTHER_TOKENS = 600  # of the answer that keeps a worker busy
MOVED_TOKENS = 120
LARGE = SIZES[1]  # smaller prompts are computed sooner than pulled, and evicted by no answer


@dataclass
class Climber:
    """One path: prompts that go colocated, or by a hand-off.

    ``texts`` holds the answers by size and salt.
    """

    name: str
    mode: str
    names: tuple[str, ...]
    settings: dict = field(default_factory=dict)
    fleet: LadderFleet | None = None
    sizes: tuple[int, ...] = ()
    texts: dict[tuple[int, int], str] = field(default_factory=dict)
    alone: dict[tuple[int, int], str] = field(default_factory=dict)
    block_bytes: int = BLOCK_TOKENS * 4 * 2 * 2 * 8 * 2  # as ``build_emulated`` has it

    async def seed(self, size: int, salt: int) -> None:
        """Bring the fleet to where the prompt can go this path."""

    async def step(self, size: int, salt: int) -> None:
        """Send one prompt."""
        answer = await self.fleet.ask(size, salt, self.mode)
        assert f"mode={self.mode}" in answer.route
        assert f"decode={self.names[-1]}" in answer.route
        self.check(answer, size, salt)

    def check(self, answer: Answer, size: int, salt: int, attempts: int = 1) -> None:
        assert answer.attempts == attempts, (self.name, size, answer.story["timeline"])
        assert answer.usage["prompt_tokens"] == size
        assert len(self.fleet.deaths) == attempts - 1, self.fleet.deaths
        self.fleet.deaths.clear()
        self.texts[size, salt] = answer.text

    @contextlib.asynccontextmanager
    async def busy(self):
        """All workers of the path write another answer meanwhile."""
        fields = {"max_tokens": OTHER_TOKENS}
        other = asyncio.create_task(self.fleet.ask(100, 9, self.mode, **fields))
        await until(lambda: self.fleet.gateway.admission.running, 10)
        yield
        answer = await other
        assert answer.usage["completion_tokens"] == OTHER_TOKENS


class PulledPrefix(Climber):
    """The prompt's blocks lie at one worker, and another one answers."""

    async def seed(self, size: int, salt: int) -> None:
        index = self.fleet.gateway.prefix_index
        whole = index.total_hashes + size // BLOCK_TOKENS
        with self.fleet.avoiding(self.names[1]):
            await self.fleet.ask(size, salt, self.mode)
        # The worker tells Redis of its blocks, and Redis the router.
        await until(lambda: index.total_hashes >= whole, 20)

    async def step(self, size: int, salt: int) -> None:
        with self.fleet.avoiding(self.names[0]):
            answer = await self.fleet.ask(size, salt, self.mode)
        assert f"decode={self.names[1]}" in answer.route
        [source] = answer.story["prefix_from"]
        assert source["worker_id"] == self.names[0]
        assert answer.cached_tokens > size * 9 // 10
        self.check(answer, size, salt)


class MovedAnswer(Climber):
    """The worker is killed in the middle of its answer, and another one writes the rest."""

    async def step(self, size: int, salt: int) -> None:
        ask = self.fleet.ask(size, salt, self.mode, max_tokens=MOVED_TOKENS)
        asked = asyncio.create_task(ask)
        await until(lambda: self._written(size), 300)
        [active] = [one for one in self._active if one.record.prompt_tokens == size]
        killed = active.decode_id
        self.fleet.workers[killed].signal_all(signal.SIGKILL)
        moved = await asked
        assert moved.usage["completion_tokens"] == MOVED_TOKENS
        assert len(moved.story["moves"]) == 1
        self.check(moved, size, salt, attempts=2)
        left = await self.fleet.ask(size, salt, self.mode, max_tokens=MOVED_TOKENS)
        assert left.attempts == 1
        assert left.text == moved.text
        await self.fleet.replace(killed)

    @property
    def _active(self) -> list:
        return [one for one in self.fleet.gateway.active.values() if not one.record.ended]

    def _written(self, size: int) -> bool:
        return any(
            one.record.prompt_tokens == size and any(c.token_ids for c in one.record.choices)
            for one in self._active
        )


class BroughtBack(Climber):
    """A part of the prompt's blocks was evicted from the pool, and comes back from a tier."""

    async def seed(self, size: int, salt: int) -> None:
        before = await self._moved("saved")
        await self.fleet.ask(size, salt, self.mode)
        lacking = evicted_blocks(size)
        saved, last = before, -1.0
        async with asyncio.timeout(120):  # until all is saved that would be evicted soon
            while saved - before < lacking * self.block_bytes or saved != last:
                await asyncio.sleep(0.2)
                last, saved = saved, await self._moved("saved")
        filler = (pool_blocks(size) - size // BLOCK_TOKENS + lacking) * BLOCK_TOKENS
        await self.fleet.ask(filler, salt + 50, self.mode)

    async def step(self, size: int, salt: int) -> None:
        before = await self._moved("brought")
        answer = await self.fleet.ask(size, salt, self.mode)
        assert answer.cached_tokens > size * 9 // 10
        brought = await self._moved("brought") - before
        assert brought >= evicted_blocks(size) * self.block_bytes // 2, brought
        self.check(answer, size, salt)

    async def _moved(self, direction: str) -> float:
        """Bytes that went into the tier, or came back from it."""
        address = self.fleet.workers[self.names[0]].record.metrics_address
        page = await asyncio.to_thread(page_of, f"http://{address}/metrics")
        name = f'baton_kv_tier_moved_bytes_total{{direction="{direction}"'
        lines = [line for line in page.splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


def page_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


def evicted_blocks(size: int) -> int:
    """Blocks of a prompt that its fleet evicts before it comes again."""
    return size // BLOCK_TOKENS // 5


def pool_blocks(size: int) -> int:
    """The pool of a worker with tiers: a prompt of this size, and not much beside it."""
    return size // BLOCK_TOKENS * 6 // 5 + 64


class TwoRanks(Climber):
    """A prefill worker of two ranks hands over to a decode worker of one."""

    async def seed(self, size: int, salt: int) -> None:
        """One rank computes the same prompt, from no cache."""
        with self.fleet.avoiding("prefill-0"):
            answer = await self.fleet.ask(size, salt, "colocated", cache_salt="alone")
        assert answer.cached_tokens == 0
        self.alone[size, salt] = answer.text

    async def step(self, size: int, salt: int) -> None:
        await super().step(size, salt)
        assert self.texts[size, salt] == self.alone[size, salt]


def climbers(sizes: Sequence[int], model: str) -> list[Climber]:
    """All paths; ``model`` is the tiny one of the two ranks: emulated engines have one rank."""
    pair = ("prefill-0", "decode-0")
    two = ("decode-0", "decode-1")
    found = [Climber("colocated", "colocated", two[:1])]
    for transport in ("shared_memory", "tcp", "grpc"):
        settings = {"transports": (transport,)}
        found.append(Climber(transport, "disaggregated", pair, settings))
    large = tuple(size for size in sizes if size >= LARGE)
    found.append(PulledPrefix("pulled_prefix", "colocated", two, sizes=large))
    found.append(MovedAnswer("moved_answer", "colocated", two))
    for size in large:
        tiers = KvTierSettings(memory_mb=64 + size // 500)
        # A block comes back where copying it takes less time than computing it.
        settings = {"kv_blocks": pool_blocks(size), "kv_tiers": tiers, "emulated_token_s": 2e-5}
        found.append(BroughtBack(f"tier_{size}", "colocated", two[:1], settings, sizes=(size,)))
    settings = {
        "model": model,
        "max_context_tokens": CONTEXT_TOKENS,
        "roles": {"prefill": {"tensor_parallel": 2}},
    }
    found.append(TwoRanks("two_ranks", "disaggregated", pair, settings))
    for climber in found:
        climber.sizes = climber.sizes or tuple(sizes)
    return found
