"""A prompt that everybody asks, and a worker that has just come: neither draws all to one place."""

import heapq
import random
from collections import Counter

import pytest

from baton.registry.types import EventBatch
from baton.types.block_hashes import block_hashes
from baton.types.params import SamplingParams
from benchmarks.placement import fleet
from router.request import GenerationRequest
from router.routing.placement.native.library import load
from router.routing.placement.placer import Placer
from router.routing.placement.prefix_index import PrefixIndex
from router.settings import LaneSettings

CLIENTS, ANSWER, PROMPT = 200, 64, tuple(range(2048))
REPORT_NS, SECOND_NS = 250_000_000, 1_000_000_000
HASHES = block_hashes(b"s" * 16, PROMPT)


class Closed:
    """Workers in virtual time, and clients that ask again as soon as they are answered.

    A worker reads prompts one after the other, 3,000 tokens a second, and reports every 250 ms.
    """

    def __init__(self, workers: int) -> None:
        draw = random.Random(1)
        self.slots = fleet(0, workers + 1, draw)
        self.late = self.slots.pop()
        self.index, self.now_ns = PrefixIndex(), 0
        settings = LaneSettings(model="m", model_names=("m",))
        self.placer = Placer(
            settings,
            self,
            self.index,
            clock_ns=lambda: self.now_ns,
            random_source=draw,
            hashes_of=lambda *_: HASHES,
        )
        self.work: Counter[str] = Counter()  # tokens computed
        self.streams: Counter[str] = Counter()
        self._free_ns: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        self._told: set[str] = set()
        self._events: list[tuple[int, int, str, str, int]] = []
        self._asked = 0
        self.report()

    # --- router.routing.placement.placer.Workers

    @property
    def usable(self):
        return self.slots

    def __iter__(self):
        return iter(self.slots)

    def get(self, worker_id):
        return next(slot for slot in self.slots if slot.worker_id == worker_id)

    def news(self):
        return None

    # --- time

    def report(self) -> None:
        for slot in (*self.slots, self.late):
            status = type(slot.link.status)()
            status.CopyFrom(slot.link.status)
            running = self.streams[slot.worker_id]
            status.running = status.answering = running
            waits_ns = max(self._free_ns[slot.worker_id] - self.now_ns, 0)
            status.queued_prompt_tokens = int(waits_ns / 1e9 * 3000)
            slot.link.status = status
            self.placer.book.reported(slot.worker_id, self.now_ns)

    def ask(self) -> None:
        self._asked += 1
        request = GenerationRequest(
            request_id=f"r{self._asked}",
            prompt=PROMPT,
            sampling=SamplingParams(max_tokens=ANSWER),
            arrived_ns=0,
            deadline_ns=10**18,
        )
        chosen = self.placer.place(request).chosen
        worker_id, blocks = chosen.decode.worker_id, self._held[chosen.decode.worker_id]
        uncached = len(PROMPT) - min(blocks * 16, len(PROMPT) - 1)
        self._held[worker_id] = len(HASHES)  # who is read behind it finds it
        self.work[worker_id] += uncached + ANSWER
        self.streams[worker_id] += 1
        read_ns = max(self._free_ns[worker_id], self.now_ns) + int(uncached / 3000 * 1e9)
        self._free_ns[worker_id] = read_ns
        step_s = 0.02 * (1 + 0.023 * self.streams[worker_id])
        end_ns = read_ns + int(ANSWER * step_s * 1e9)
        heapq.heappush(self._events, (read_ns, self._asked, "read", worker_id, self._asked))
        heapq.heappush(self._events, (end_ns, self._asked, "end", worker_id, self._asked))

    def run(self, until_ns: int) -> None:
        next_report_ns = self.now_ns + REPORT_NS
        while self._events[0][0] < until_ns:
            at_ns, _, what, worker_id, number = heapq.heappop(self._events)
            while next_report_ns <= at_ns:
                self.now_ns = next_report_ns
                self.report()
                next_report_ns += REPORT_NS
            self.now_ns = at_ns
            if what == "read":
                self.placer.book.computed(f"r{number}", self.now_ns)
                self._store(worker_id)
            else:
                self.streams[worker_id] -= 1
                self.placer.book.release(f"r{number}", self.now_ns)
                self.ask()

    def _store(self, worker_id: str) -> None:
        if worker_id not in self._told:
            self._told.add(worker_id)
            incarnation = worker_id.encode().rjust(16)
            batch = EventBatch(incarnation=incarnation, sequence=1, stored=tuple(HASHES))
            self.index.apply(batch)


@pytest.fixture(params=["native", pytest.param("plain", marks=pytest.mark.slow)])
def eight(request, monkeypatch) -> Closed:
    if request.param == "plain":
        monkeypatch.setattr("router.routing.placement.worker_columns.load", lambda: None)
    elif load() is None:
        pytest.skip("no compiler")
    return Closed(8)


def test_two_hundred_clients_with_one_prompt_are_spread(eight):
    for _ in range(CLIENTS):
        eight.ask()
    eight.run(10 * SECOND_NS)
    work = [eight.work[slot.worker_id] for slot in eight.slots]
    assert max(work) / (sum(work) / len(work)) <= 1.2, work


def test_a_worker_that_has_just_come_gets_its_part_and_not_everything(eight):
    for _ in range(CLIENTS):
        eight.ask()
    eight.run(10 * SECOND_NS)
    eight.slots.append(eight.late)
    name = eight.late.worker_id
    most = 0
    for tenth in range(130):
        eight.run(10 * SECOND_NS + tenth * SECOND_NS // 10)
        most = max(most, eight.streams[name])
    # What ends is taken off before its worker reports it: else this had twice its part at once.
    assert most <= 1.2 * CLIENTS / 9
    eight.work.clear()
    eight.run(43 * SECOND_NS)
    work = [eight.work[slot.worker_id] for slot in eight.slots]
    assert max(work) / (sum(work) / len(work)) <= 1.2, work
