"""Cost of placements and of the prefix index as the fleet grows, on one core.

    python -m benchmarks.placement [--json FILE]

No network is involved: the workers are reports, the blocks are random hashes. Times are CPU time.
Figures with a goal also show how many times better they are.
"""

import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from batonpb.common_pb2 import BlockCounts, Capabilities, EdgeRate, KvGroup, WireRange, WorkerStatus
from batonpb.decode_pb2 import Hello
from rich.console import Console
from rich.table import Table

from baton.config.fleet_file import DEFAULT_MODEL
from baton.registry.types import EventBatch, Role, WorkerRecord
from baton.types.params import SamplingParams
from loadtest.simulator.table import NoListener
from router.process_core import ProcessCore
from router.request import GenerationRequest
from router.routing.placement.block_table import PlainBlockTable
from router.routing.placement.placer import Placer
from router.routing.placement.prefix_index import PrefixIndex
from router.routing.workers.link import WorkerLink
from router.routing.workers.slot import WorkerSlot
from router.settings import LaneSettings

PLACEMENT_BOUND_US = {50: 200.0, 500: 1000.0}
LOOKUP_BOUND_US = 100.0
MEMORY_BOUND_BYTES = 1 << 30
BOUND_OPERATIONS_PER_S = 1e6
_PROMPT_TOKENS = 512
_LOOKUP_BLOCKS = 2048
_BATCH = 1024
_LATER_NS = 1_000_000_000  # time of a report that includes everything booked


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """Result with its unit; ``of_bound`` is how many times better than the goal it is."""

    what: str
    value: float
    unit: str
    of_bound: float | None = None


class _Workers:
    """Implementation of ``router.routing.placement.placer.Workers``."""

    def __init__(self, slots: list[WorkerSlot]) -> None:
        self._slots = slots
        self._of_name = {slot.worker_id: slot for slot in slots}
        self._news = set(self._of_name)
        for name, slot in self._of_name.items():
            slot.on_change = partial(self._news.add, name)

    def get(self, worker_id: str) -> WorkerSlot | None:
        return self._of_name.get(worker_id)

    def news(self) -> set[str]:
        return self._news

    @property
    def usable(self) -> list[WorkerSlot]:
        return self._slots

    def __iter__(self) -> Iterator[WorkerSlot]:
        return iter(self._slots)


def fleet(prefills: int, decodes: int, draw: random.Random) -> list[WorkerSlot]:
    """Return slots of workers that have reported."""
    names = [f"prefill-{i}" for i in range(prefills)] + [f"decode-{i}" for i in range(decodes)]
    return [_slot(name, _status(name, prefills, draw)) for name in names]


def _status(name: str, prefills: int, draw: random.Random) -> WorkerStatus:
    edges = min(prefills, 64) if name.startswith("decode") else 0
    return WorkerStatus(
        state="ready",
        kv_blocks=BlockCounts(total=4000, free=3000, cached=800, leased=200),
        running=draw.randrange(4),
        answering=draw.randrange(4),
        queued_prompt_tokens=draw.randrange(2000),
        prefill_tokens_per_s=3000.0,
        prefill_token_s=1 / 3000,
        prefill_context_s=1e-8,
        decode_step_s=0.02,
        edges=[EdgeRate(prefill_worker_id=f"prefill-{i}", bytes_per_s=1e9) for i in range(edges)],
    )


def _slot(name: str, status: WorkerStatus) -> WorkerSlot:
    role: Role = "prefill" if name.startswith("prefill") else "decode"
    slot = WorkerSlot(WorkerRecord(worker_id=name, role=role, state="ready", epoch=1))
    link = WorkerLink(name, "", NoListener(), Hello(), ProcessCore())
    link.status = status
    link.incarnation = name.encode().rjust(16)
    link.live = True
    link.capabilities = Capabilities(
        wire=WireRange(min=1, max=2),
        numerics_id="exact/bench",
        weights_digest=b"w" * 16,
        kv_groups=[
            KvGroup(layer_ids=range(30), num_kv_heads=3, head_dim=64, block_tokens=16, dtype="bf16")
        ],
    )
    slot.link = link
    return slot


def placer_of(slots: list[WorkerSlot]) -> Placer:
    """Return a placer of these workers, with an empty index."""
    settings = LaneSettings(model=DEFAULT_MODEL, model_names=("bench",))
    return Placer(settings, _Workers(slots), PrefixIndex())


def placement_us(prefills: int, decodes: int, placements: int = 300) -> float:
    """Return the median time of a placement while some of the workers report again."""
    draw = random.Random(1)
    slots = fleet(prefills, decodes, draw)
    placer = placer_of(slots)
    book = placer.book
    prompts = [tuple(draw.randrange(30_000) for _ in range(_PROMPT_TOKENS)) for _ in range(32)]
    times_s = []
    for number in range(placements):
        for slot in draw.sample(slots, max(len(slots) // 100, 1)):
            if slot.link is not None:
                slot.link.status = _status(slot.worker_id, prefills, draw)
                book.reported(slot.worker_id, time.monotonic_ns() + _LATER_NS)
        request = GenerationRequest(
            request_id=f"r{number}",
            prompt=prompts[number % len(prompts)],
            sampling=SamplingParams(max_tokens=64),
            arrived_ns=0,
            deadline_ns=10**18,
        )
        times_s.append(_took_s(partial(placer.place, request)))
    return statistics.median(times_s) * 1e6


def _took_s(work: Callable[[], Any]) -> float:
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s


def index_figures(workers: int, blocks: int, *, plain: bool = False) -> list[Figure]:
    """Measure an index of so many blocks, each on one worker, and a prompt that many have."""
    draw = random.Random(2)
    before_bytes = _resident_bytes()
    index = PrefixIndex(table=PlainBlockTable() if plain else None)
    per_worker = blocks // workers
    hot = [draw.randbytes(16) for _ in range(_LOOKUP_BLOCKS)]
    prompt = b"".join(hot)  # the format of `prompt_hashes`
    spent_s = 0.0
    longest_s = 0.0
    operations = 0
    for number in range(workers):
        incarnation = f"worker-{number}".encode().rjust(16)
        for sequence, begin in enumerate(range(0, per_worker, _BATCH), start=1):
            size = min(_BATCH, per_worker - begin)
            packed = draw.randbytes(16 * size)
            stored = tuple(packed[16 * i : 16 * i + 16] for i in range(size))
            batch = EventBatch(incarnation=incarnation, sequence=sequence, stored=stored)
            took_s = _took_s(partial(index.apply, batch))
            spent_s = spent_s + took_s
            longest_s = max(longest_s, took_s)
            operations += size
    memory_bytes = _resident_bytes() - before_bytes
    for number in range(0, workers, 20):
        incarnation = f"worker-{number}".encode().rjust(16)
        sequence = -(-per_worker // _BATCH) + 1
        stored = tuple(hot[: draw.randrange(_LOOKUP_BLOCKS // 2, _LOOKUP_BLOCKS)])
        index.apply(EventBatch(incarnation=incarnation, sequence=sequence, stored=stored))
    lookups_us = [_took_s(partial(index.prefixes, prompt)) * 1e6 for _ in range(200)]
    lookup_us = statistics.median(lookups_us)
    rate = operations / spent_s
    name = f"{blocks:,} blocks of {workers:,} workers{', plain table' if plain else ''}"
    return [
        Figure(
            what=f"{name}: memory",
            value=memory_bytes / 2**20,
            unit="MiB",
            of_bound=MEMORY_BOUND_BYTES / memory_bytes * blocks / 1e7,
        ),
        Figure(
            what=f"{name}: stored",
            value=rate / 1e6,
            unit="million/s",
            of_bound=rate / BOUND_OPERATIONS_PER_S,
        ),
        Figure(what=f"{name}: longest batch of {_BATCH:,}", value=longest_s * 1e3, unit="ms"),
        Figure(
            what=f"{name}: a prompt of {_LOOKUP_BLOCKS:,} blocks, on a twentieth",
            value=lookup_us,
            unit="µs",
            of_bound=LOOKUP_BOUND_US / lookup_us,
        ),
    ]


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def main(
    json: Annotated[Path | None, typer.Option(help="Write figures here.")] = None,
    blocks: Annotated[int, typer.Option(help="Blocks of the largest index.")] = 10_000_000,
) -> None:
    """Measure placements and the prefix index by size."""
    figures = []
    for size in (5, 50, 200, 500):
        value_us = placement_us(size, size)
        bound_us = PLACEMENT_BOUND_US.get(size)
        figures.append(
            Figure(
                what=f"a placement at {size} x {size} workers",
                value=value_us,
                unit="µs",
                of_bound=bound_us / value_us if bound_us is not None else None,
            )
        )
    for workers, held in ((10, blocks // 100), (100, blocks // 10), (1000, blocks)):
        figures += index_figures(workers, held)
    figures += index_figures(100, blocks // 10, plain=True)
    table = Table("figure", "value", "", "times the goal")
    for one in figures:
        times = f"{one.of_bound:.2f}" if one.of_bound is not None else ""
        table.add_row(one.what, f"{one.value:,.2f}", one.unit, times)
    Console().print(table)
    if json is not None:
        json.write_bytes(msgspec.json.encode(figures))


if __name__ == "__main__":
    typer.run(main)
