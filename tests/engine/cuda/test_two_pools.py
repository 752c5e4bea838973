"""A pool on the device and one in host memory: each reader of a block finds its KV.

The device is emulated: its tokens depend on every byte of a sequence's KV in the device's pool.
Hand-offs, tiers and published prompts use the pool in host memory, as the worker's shell does.
"""

import random
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from baton.engine.core.core import EngineCore
from baton.engine.core.plan import PlanRow, StepPlan
from baton.engine.core.scheduler import SchedulerConfig
from baton.engine.core.sequence import EngineRequest, Kind, RequestSpec
from baton.engine.core.tiers.places import TierPlaces
from baton.engine.core.tiers.tiers import Copied
from baton.engine.cuda.host_pool import HostPool
from baton.engine.emulated import EmulatedRunner
from baton.engine.numerics import DTYPES, NumericsSetupError
from baton.engine.process.tier_copier import BlockMover
from baton.engine.process.tier_shelves import MemoryShelf
from baton.types import events as ev
from baton.types.geometry import KvGeometry
from baton.types.params import SampledToken, SamplingParams
from benchmarks.gpu.host_steps import measure
from benchmarks.gpu.model import TOY, Machine, random_decoder
from tests.engine.core.draft_tokens import oracle

GEOMETRY = KvGeometry(num_layers=2, num_kv_heads=1, head_dim=4, num_blocks=14, dtype="bf16")
ROOMY = KvGeometry(num_layers=2, num_kv_heads=1, head_dim=4, num_blocks=64, dtype="bf16")
SIZE = GEOMETRY.block_tokens
SEED = b"s" * 16
PROMPTS = [[7 + length % 5] * 16 + list(range(length)) for length in (1, 3, 15, 16, 17, 30, 41)]
ANSWER_TOKENS = 24


class TwoPools(EmulatedRunner):
    """Computes in the device's pool, and shows others the host's."""

    def __init__(self, host: bytearray, geometry: KvGeometry) -> None:
        device = bytearray(geometry.pool_bytes)
        super().__init__(geometry, device)
        self.pools = HostPool(self.view(host), self.view(device))

    def view(self, pool: bytearray) -> torch.Tensor:
        return torch.frombuffer(pool, dtype=DTYPES["bf16"]).view(self.geometry.shape)

    def execute(
        self, plan: StepPlan, on_layers_done: Callable[[int], None] | None = None
    ) -> list[list[SampledToken]]:
        self.pools.before(plan)
        tokens = super().execute(StepPlan(plan.rows))
        self.pools.after(plan.rows, ends=on_layers_done is not None)
        self.pools.wait()
        if on_layers_done is not None:
            on_layers_done(self.geometry.num_layers)
        return tokens


def answers() -> dict[tuple[tuple[int, ...], int], list[int]]:
    """Tokens of each prompt, by an engine with one pool."""
    core = EngineCore(EmulatedRunner(ROOMY, bytearray(ROOMY.pool_bytes)), SchedulerConfig())
    found: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for number, prompt in enumerate(PROMPTS):
        submit(core, f"{number}", prompt, Kind.FULL, 2)
    while (plan := core.plan(0)).rows:
        for event in core.apply(plan, core.runner.execute(plan), 0, 1):
            if isinstance(event, ev.Tokens):
                key = (tuple(PROMPTS[int(event.request_id)]), event.choice)
                found.setdefault(key, []).extend(token.token for token in event.tokens)
    return found


def submit(core: EngineCore, name: str, prompt: list[int], kind: Kind, choices: int) -> None:
    params = SamplingParams(
        max_tokens=ANSWER_TOKENS, temperature=1.0, seed=5, n=choices, ignore_eos=True
    )
    spec = RequestSpec(kind=kind, params=params, hash_seed=SEED, ticket=int(name.split("-")[-1]))
    core.scheduler.submit(EngineRequest(request_id=name, prompt=list(prompt), spec=spec), 0)


class Worker:
    """An engine with two pools, tiers, guessed tokens, and a shell that hands KV over."""

    def __init__(self, seed: int, expected: Mapping[tuple[tuple[int, ...], int], Sequence[int]]):
        self.random = random.Random(seed)
        self.expected = expected
        self.host = bytearray(GEOMETRY.pool_bytes)
        self.runner = TwoPools(self.host, GEOMETRY)
        self.shell = EmulatedRunner(GEOMETRY, self.host)
        tier = TierPlaces("memory", 20)
        shelves = {"memory": MemoryShelf(20, GEOMETRY.block_bytes)}
        self.mover = BlockMover(self.host, GEOMETRY, shelves)
        self.core = EngineCore(
            self.runner,
            SchedulerConfig(6, 40),
            group_layers_bytes=1,
            speculation=oracle(expected, 0.6),
            tiers=[tier],
            check_every_step=True,
        )
        self.prompts: dict[str, list[int]] = {}
        self.pinned: dict[str, int] = {}
        self.blocks: dict[str, tuple[int, ...]] = {}
        self.got: dict[tuple[str, int], list[int]] = {}
        self.counts = dict.fromkeys(("published", "handed over", "restored", "tokens"), 0)

    def submit(self) -> None:
        kind = self.random.choice([Kind.FULL, Kind.FULL, Kind.REMOTE, Kind.PREFILL])
        name = f"{kind.value}-{len(self.prompts)}"
        prompt = self.random.choice(PROMPTS)
        self.prompts[name] = prompt
        submit(self.core, name, prompt, kind, self.random.choice([1, 1, 2]))

    def step(self) -> bool:
        plan = self.core.plan(0)
        events: list[ev.Event] = self.core.batch.take_events()
        publications = self.core.publications(plan)

        def publish(done: int) -> None:
            for publication in publications:
                if (event := publication.on_layers_done(done, 2)) is not None:
                    self.check_published(event, events)

        if plan.rows:
            results = self.core.runner.execute(plan, publish if publications else None)
            events += self.core.apply(plan, results, 0, 1)
        else:
            events += self.core.take_events()
        for event in events:
            self.take(event)
        for copy in self.core.take_copies(0):
            self.core.tiers.copied(Copied(copy.number, self.mover.move(copy), 1), 0)
            self.counts["restored"] += copy.target == "pool"
        self.check_cached()
        return bool(plan.rows)

    def take(self, event: ev.Event) -> None:
        match event:
            case ev.Admitted():
                self.blocks[event.request_id] = event.blocks
            case ev.Reserved():
                self.pinned[event.request_id] = event.skip_blocks
                self.core.scheduler.bind(event.request_id, event.generation)
            case ev.Bound():
                self.hand_over(event)
            case ev.Revoked():
                self.core.scheduler.drained(event.request_id, event.generation)
            case ev.PromptDone() if event.request_id.startswith("prefill"):
                self.core.scheduler.release(event.request_id)
            case ev.Tokens():
                tokens = self.got.setdefault((event.request_id, event.choice), [])
                tokens += [token.token for token in event.tokens]
                prompt = tuple(self.prompts[event.request_id])
                first = event.request_id.startswith("remote")
                assert tokens == self.expected[prompt, event.choice][first:][: len(tokens)]
                self.counts["tokens"] += len(event.tokens)

    def hand_over(self, event: ev.Bound) -> None:
        """Write the KV of a prompt beyond its cached blocks, as another worker's would arrive."""
        prompt = self.prompts[event.request_id]
        start = self.pinned[event.request_id] * SIZE
        row = PlanRow(sequence_id=0, tokens=prompt[start:], start=start, block_ids=event.blocks)
        for layer in range(2):
            self.shell._write(layer, row)
        choices = range(self.core.scheduler._requests[event.request_id].spec.params.n)
        first = [self.expected[tuple(prompt), choice][0] for choice in choices]
        done = self.core.scheduler.commit(event.request_id, event.generation, first, 0)
        self.counts["handed over"] += done  # not if it was revoked in this step

    def check_published(self, event: ev.Published, earlier: list[ev.Event]) -> None:
        for admission in earlier:
            if isinstance(admission, ev.Admitted):
                self.blocks[admission.request_id] = admission.blocks
        blocks = self.blocks[event.request_id][event.block_begin :][: event.block_count]
        layers = range(event.layer_begin, event.layer_begin + event.layer_count)
        left = event.valid_tokens
        for block in blocks:
            tokens = min(left, SIZE)
            left -= tokens
            for layer in layers:
                mine = self.shell._pool[layer, :, block, :tokens]
                assert (mine == self.runner._pool[layer, :, block, :tokens]).all()
        self.counts["published"] += len(blocks)

    def check_cached(self) -> None:
        pool = self.core.pool
        for block_hash in pool.hashes():
            block = pool.match([block_hash])[0]
            same = (self.shell._pool[:, :, block] == self.runner._pool[:, :, block]).all()
            assert same or block in pool._written, "the host has each findable block"


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))]
)
def test_tokens_pages_and_tiers_are_right_with_a_pool_on_each_side(seed: int) -> None:
    worker = Worker(seed, answers())
    for _ in range(60):
        if worker.random.random() < 0.6:
            worker.submit()
        if worker.random.random() < 0.1:
            worker.core.scheduler.cancel(worker.random.choice([*worker.prompts, "none"]))
        worker.step()
    while worker.step() or worker.core.batch.has_work():
        pass
    assert all(worker.counts.values()), worker.counts
    assert worker.core.pool.evictions
    assert worker.core.batch.preemptions


def test_the_check_at_start_finds_blocks_that_change_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, device = torch.zeros(2, 2, 3, 16, 1, 4), torch.zeros(2, 2, 3, 16, 1, 4)
    pools = HostPool(host, device)
    pools.verify()
    assert not host.any()
    assert not device.any()
    monkeypatch.setattr(pools, "before", lambda plan: None)
    with pytest.raises(NumericsSetupError, match="between the GPU and host memory"):
        pools.verify()
    monkeypatch.setattr(pools, "after", lambda rows, ends: None)
    with pytest.raises(NumericsSetupError, match="between the GPU and host memory"):
        pools.verify()


def test_the_bench_of_host_time_sees_a_block_of_each_row_in_sixteen_steps() -> None:
    machine = Machine(torch.device("cpu"), torch.bfloat16, TOY, smoke=True)
    figures = measure(random_decoder(machine, 512, exact=False), 4, 64)
    assert figures["finished_blocks"] == 4 / 16
    assert figures["inputs_us"] > 0
