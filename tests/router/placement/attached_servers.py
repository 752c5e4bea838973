"""Attached servers in virtual time: the real placement, load meter and rates; nothing is computed.

    python -m tests.router.placement.attached_servers [SEEDS]

The load is `sessions` of `benchmarks/peers.py`, and the servers are those of
`benchmarks/emulated_vllm.py`: they compute one prompt at a time, and responses stream beside it.
"""

import random
import statistics
import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from batonpb.common_pb2 import WorkerStatus

from baton.engine.process.step_rates import StepRates
from baton.engine.remote.load import SETTLED_NS, LoadMeter, SequenceProgress
from baton.types.events import CacheChanged, StepDone
from baton.types.geometry import BLOCK_TOKENS, context_tokens
from baton.types.params import SamplingParams
from baton.wire.worker_status import engine_status
from benchmarks.placement import fleet
from loadtest.simulator.index_feed import IndexFeed
from loadtest.simulator.network import VirtualClock
from router.request import GenerationRequest
from router.routing.placement.placer import Placer
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.workers.slot import WorkerSlot
from router.settings import LaneSettings

MS = 1_000_000
SERVERS, BLOCKS, RATE, TOKEN_S = 4, 300, 8000, 0.01  # blocks of 32 tokens
SESSIONS, CLIENTS, TURNS, TURN_TOKENS, RESPONSE = 24, 8, 6, 320, 24
HOP_NS = 2 * MS
ROUTER_NS = 6 * MS  # time that a request takes of the router
REPORT_NS = 250 * MS


@dataclass(eq=False)
class Asked:
    """A request; ``names`` are the blocks of prompt and response."""

    id: str
    session: int
    tokens: int
    names: list[bytes]
    sent_ns: int
    cached: int = 0
    first_ns: int = 0

    @property
    def prompt(self) -> list[bytes]:
        return self.names[: self.tokens // BLOCK_TOKENS]

    @property
    def reusable(self) -> list[bytes]:
        return self.names[: (self.tokens - 1) // BLOCK_TOKENS]


class Server:
    """An emulated server."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.prompts = self.cached = 0
        self.on_change: Callable[[CacheChanged], None] = lambda _: None
        self.on_token: Callable[[Asked, int], None] = lambda *_: None
        self._held: OrderedDict[bytes, bytes] = OrderedDict()  # the second half of each block
        self._queue: deque[Asked] = deque()
        self._busy = False
        self.store([name_of("stranger", block) for block in range(6 * 62)])

    @property
    def held_blocks(self) -> int:
        return 2 * len(self._held)

    def cached_tokens(self, names: list[bytes]) -> int:
        pairs = range(1, len(names), 2)
        return next((16 * at - 16 for at in pairs if names[at] not in self._held), 32 * len(pairs))

    def store(self, names: list[bytes]) -> None:
        pairs = list(zip(names[::2], names[1::2], strict=False))
        stored = [name for pair in pairs if pair[1] not in self._held for name in pair]
        for before, last in reversed(pairs):
            self._held[last] = before
            self._held.move_to_end(last)
        removed: list[bytes] = []
        while len(self._held) > BLOCKS:
            removed += self._held.popitem(last=False)
        self.on_change(CacheChanged(tuple(stored), tuple(removed)))

    def submit(self, asked: Asked) -> None:
        self._queue.append(asked)
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._queue)
        if self._busy:
            asked = self._queue.popleft()
            asked.cached = self.cached_tokens(asked.reusable)
            self.prompts += asked.tokens
            self.cached += asked.cached
            lasts_ns = round((asked.tokens - asked.cached) / RATE * 1e9)
            self.clock.after(lasts_ns, partial(self._computed, asked))

    def _computed(self, asked: Asked) -> None:
        self.store(asked.prompt)
        self._token(asked, 1)
        self._next()

    def _token(self, asked: Asked, count: int) -> None:
        self.clock.after(HOP_NS, partial(self.on_token, asked, count))
        if count == RESPONSE:
            self.store(asked.names[: (asked.tokens + RESPONSE - 1) // BLOCK_TOKENS])
        else:
            self.clock.after(round(TOKEN_S * 1e9), partial(self._token, asked, count + 1))


class Worker:
    """Worker of a server: its meter, rates, reports and events."""

    def __init__(self, world: "World", slot: WorkerSlot) -> None:
        self.server = Server(world.clock)
        self._world = world
        self._slot = slot
        self._meter = LoadMeter(2 * BLOCKS)
        self._rates = StepRates()
        past_ns = round(1000 / RATE * 1e9)
        context = context_tokens(0, 1000)
        self._add(StepDone(prompt_tokens=1000, prompt_context=context, duration_ns=past_ns))
        self._settles = False
        self.server.on_change = self._changed
        self.server.on_token = self._token
        self._report()

    def _add(self, step: StepDone | None) -> None:
        if step is not None:
            self._rates.add(step)

    def _report(self) -> None:
        status = engine_status(self._meter.status(self.server.held_blocks), self._rates)
        status.state = "ready"
        self._slot.link.status = status
        self._world.placer.book.reported(self._slot.worker_id, self._world.clock.now_ns)
        if not self._world.over:
            self._world.clock.after(REPORT_NS, self._report)

    def _changed(self, change: CacheChanged) -> None:
        feed = partial(self._world.feed.apply, self._slot.incarnation, change)
        self._world.clock.after(60 * MS, feed)

    def submit(self, asked: Asked) -> None:
        expected = self.server.cached_tokens(asked.reusable)
        row = SequenceProgress(asked.tokens, expected, self._world.clock.now_ns)
        row.hashes = asked.reusable
        self._meter.submitted(asked.id, 0, row)
        self._world.clock.after(HOP_NS, partial(self.server.submit, asked))

    def _token(self, asked: Asked, count: int) -> None:
        if not self._settles:
            self._settle()
        now_ns, held = self._world.clock.now_ns, self.server.held_blocks
        self._add(self._meter.tokens(asked.id, 0, 1, now_ns, held))
        if count == 1:
            self._world.clock.after(HOP_NS, partial(self._world.first, asked))
        if count == RESPONSE:
            self._add(self._meter.counted(asked.id, 0, asked.cached, held))
            self._meter.ended(asked.id, 0)
            self._world.clock.after(HOP_NS, partial(self._world.end, asked))

    def _settle(self) -> None:
        self._add(self._meter.settled(self._world.clock.now_ns, self.server.held_blocks))
        self._settles = self._meter.is_open or not self._settles
        if self._settles:
            self._world.clock.after(SETTLED_NS, self._settle)


class World:
    """A router, its workers, and clients with sessions of growing prompts."""

    def __init__(self, seed: int) -> None:
        self.clock = VirtualClock()
        self.over = False
        self.first_s: list[float] = []
        self._draw = random.Random(f"{seed}/load")
        self._asked: dict[str, Asked] = {}
        self._tokens = [0] * SESSIONS
        self._turn = 0
        self._pending: list[int] = []
        self._open = 0
        self._slots = fleet(0, SERVERS, self._draw)
        index = PrefixIndex()
        self.feed = IndexFeed(index)
        self.placer = Placer(
            LaneSettings(
                model="m", model_names=("m",), external="vllm", attached=True, pull_prefixes=False
            ),
            self,
            index,
            clock_ns=lambda: self.clock.now_ns,
            random_source=random.Random(f"{seed}/router"),
            hashes_of=lambda request, _: self._asked[request.request_id].prompt,
        )
        for slot in self._slots:
            slot.link.capabilities.numerics_id = "vllm/0.32.0"
        self._workers = {slot.worker_id: Worker(self, slot) for slot in self._slots}
        self._begin_turn()
        self.clock.run()

    # --- router.routing.placement.placer.Workers

    @property
    def usable(self) -> list[WorkerSlot]:
        return self._slots

    def __iter__(self):
        return iter(self._slots)

    def get(self, worker_id: str) -> WorkerSlot | None:
        return next((slot for slot in self._slots if slot.worker_id == worker_id), None)

    def news(self) -> None:
        return None

    # --- clients

    def _begin_turn(self) -> None:
        self._turn += 1
        self.over = self._turn > TURNS
        if not self.over:
            self._pending = list(range(SESSIONS))
            self._draw.shuffle(self._pending)
            for _ in range(CLIENTS):
                self._ask()

    def _ask(self) -> None:
        session = self._pending.pop()
        self._open += 1
        self._tokens[session] += TURN_TOKENS
        tokens = self._tokens[session]
        names = [name_of(session, block) for block in range((tokens + RESPONSE) // BLOCK_TOKENS)]
        asked = Asked(f"{session}/{self._turn}", session, tokens, names, self.clock.now_ns)
        self._asked[asked.id] = asked
        self.clock.after(ROUTER_NS, partial(self._place, asked))

    def _place(self, asked: Asked) -> None:
        request = GenerationRequest(
            request_id=asked.id,
            prompt=(0,) * asked.tokens,
            sampling=SamplingParams(max_tokens=RESPONSE, ignore_eos=True),
            arrived_ns=self.clock.now_ns,
            deadline_ns=1 << 62,
        )
        chosen = self.placer.place(request).decode_id
        self.clock.after(HOP_NS, partial(self._workers[chosen].submit, asked))

    def first(self, asked: Asked) -> None:
        self.first_s.append((self.clock.now_ns - asked.sent_ns) / 1e9)
        self.placer.computed(asked.id, self.clock.now_ns)

    def end(self, asked: Asked) -> None:
        self.placer.release(asked.id, self.clock.now_ns)
        self._tokens[asked.session] += RESPONSE
        self._open -= 1
        if self._pending:
            self._ask()
        elif not self._open:
            self._begin_turn()

    # --- figures

    @property
    def cached_share(self) -> float:
        servers = [worker.server for worker in self._workers.values()]
        return sum(one.cached for one in servers) / sum(one.prompts for one in servers)

    def ttft_s(self, share: float) -> float:
        return sorted(self.first_s)[int(share * len(self.first_s))]

    def token_s(self) -> list[float]:
        """Return the time of a prompt token that each worker reports."""
        reports: list[WorkerStatus] = [slot.link.status for slot in self._slots]
        return [one.prefill_token_s for one in reports]


def name_of(*parts: object) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=16).digest()


if __name__ == "__main__":
    worlds = [World(seed) for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 12)]
    print(f"cached {100 * statistics.fmean(world.cached_share for world in worlds):.1f} %")
    for share in (0.5, 0.9, 0.99):
        mean_s = statistics.fmean(world.ttft_s(share) for world in worlds)
        each = " ".join(f"{1e3 * world.ttft_s(share):.0f}" for world in worlds)
        print(f"first token at p{100 * share:.0f}: {1e3 * mean_s:.0f} ms ({each})")
