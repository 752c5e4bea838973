"""Simulation of a trace on a fleet, with deaths and restarts of workers."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from hashlib import blake2b

from baton.planner.planner import Planner
from baton.planner.sizes import SizePlanner
from baton.registry.types import Role
from baton.types.params import SamplingParams
from baton.types.slo import Slo
from loadtest.simulator.attempt import DETECT_NS
from loadtest.simulator.network import Network, VirtualClock
from loadtest.simulator.planning import SimulatedPlanner
from loadtest.simulator.policies import FLEET, POLICIES
from loadtest.simulator.records import Record
from loadtest.simulator.router import SimulatedRouter
from loadtest.simulator.setup import Setup
from loadtest.simulator.table import SimulatedTable, capabilities
from loadtest.simulator.worker import SimulatedWorker
from loadtest.workloads.call_graph import CallFrontier
from loadtest.workloads.traces import TraceRequest
from router.request import GenerationRequest

TURN_NS = 600_000_000  # until routers place by another role; measured on a real fleet
ANSWER_LIMIT_TOKENS = 4096  # max_tokens of requests: the router does not know the real length


class Simulation:
    """Simulation of one fleet and one trace, whose requests are in the order of arrival."""

    def __init__(self, setup: Setup, trace: Sequence[TraceRequest]) -> None:
        if setup.decode_workers < 1:
            raise ValueError(f"{setup.decode_workers} decode workers: at least 1 is needed")
        if setup.policy != FLEET and setup.policy not in POLICIES:
            names = ", ".join([FLEET, *POLICIES])
            raise ValueError(f"policy {setup.policy!r} is unknown; use one of {names}")
        self.setup = setup
        self.clock = VirtualClock()
        kv_bytes_per_token = setup.timing.kv_bytes_per_token
        self._table = SimulatedTable(capabilities(setup.block_tokens, kv_bytes_per_token))
        self._network = Network(setup.link, self.clock, setup.nodes)
        self.router = SimulatedRouter(setup, self._table, self._network)
        self.lives: list[SimulatedWorker] = []
        self.turns = 0
        roles: list[Role] = ["prefill"] * setup.prefill_workers
        roles += ["decode"] * setup.decode_workers
        self.roles = {f"worker-{number}": role for number, role in enumerate(roles)}
        computing: Role = "prefill" if setup.prefill_workers else "decode"
        self.computing = {name for name, role in self.roles.items() if role == computing}
        self._frontier: CallFrontier | None = None  # of a trace of agents
        if any(request.after for request in trace):
            pauses_s = [one.pause_s if one.after else one.arrival_s for one in trace]
            self._frontier = CallFrontier(
                [one.after for one in trace], [pause_s / setup.speed for pause_s in pauses_s]
            )
        self.records = self._records(trace)
        self.wanted: dict[Role, int] = {
            "prefill": setup.prefill_workers,
            "decode": setup.decode_workers,
        }
        self._pending: list[str] = []  # workers that start
        self.added_ns = dict.fromkeys(self.roles, 0)
        self.left_ns: dict[str, int] = {}
        self.planner = self._planner() if setup.plan == "auto" else None
        self.left_out = 0  # number of requests that an interrupted run has not ended
        self._last_arrival_ns = max(record.request.arrived_ns for record in self.records)

    def run(self) -> list[Record]:
        """Run until every request has ended; return the records in the order of arrival."""
        for name in list(self.roles):
            self._start(name, 1, random.Random(f"{self.setup.seed}/faults/{name}"))
        if self._frontier is None:
            for record in self.records:
                self.clock.at(record.request.arrived_ns, partial(self.router.submit, record))
        else:
            self._follow(self._frontier)
        if self.planner is not None:
            self.planner.start()
        self.clock.run()
        return self.records

    def _follow(self, frontier: CallFrontier) -> None:
        """Send each call when those that it waits for have ended, from now on."""
        places = {record.id: place for place, record in enumerate(self.records)}
        records = self.records

        def send(ready: Iterable[tuple[int, float]]) -> None:
            for place, at_s in ready:
                record = records[place]
                record.sent_ns = max(round(at_s * 1e9), self.clock.now_ns)
                record.request = replace(record.request, arrived_ns=record.sent_ns)
                self._last_arrival_ns = max(self._last_arrival_ns, record.sent_ns)
                self.clock.at(record.sent_ns, partial(self.router.submit, record))

        self.router.on_ended = lambda record: send(
            frontier.ended(places[record.id], self.clock.now_ns / 1e9)
        )
        send(frontier.begin(0.0))

    def drop_unfinished(self) -> None:
        """Keep only the records of requests that have ended, after an interrupted run."""
        ended = [record for record in self.records if record.ended_ns]
        self.left_out = len(self.records) - len(ended)
        self.records = ended

    def _planner(self) -> SimulatedPlanner:
        setup = self.setup
        if setup.slo is None:
            raise ValueError("the planner needs limits of latency (slo)")
        if not setup.prefill_workers or setup.decode_workers < 1:
            raise ValueError("the planner needs a worker of each role")
        self._check_pools()
        planner = Planner(setup.slo, self._size_planner(setup.slo))
        return SimulatedPlanner(planner, self, self._table, setup.max_batch_requests)

    @property
    def is_busy(self) -> bool:
        """Return whether a request has not ended."""
        return self.router.ended < len(self.records)

    def _size_planner(self, slo: Slo) -> SizePlanner | None:
        setup = self.setup
        if not setup.max_workers:
            return None
        if not setup.min_workers <= len(self.roles) <= setup.max_workers:
            raise ValueError(
                f"{len(self.roles)} workers at the start: not in --min-workers "
                f"{setup.min_workers} to --max-workers {setup.max_workers}"
            )
        return SizePlanner(setup.min_workers, setup.max_workers, dict(self.wanted), slo.ttft_s)

    def resize(self, sizes: Mapping[Role, int]) -> None:
        """Start workers, which takes ``start_s``, or let the least busy ones leave."""
        for role, size in sizes.items():
            for _ in range(size - self.wanted[role]):
                self._add(role)
            for _ in range(self.wanted[role] - size):
                self._remove(role)
            self.wanted[role] = size

    def _add(self, role: Role) -> None:
        name = f"worker-{len(self.roles)}"
        self.roles[name] = role
        self.added_ns[name] = self.clock.now_ns
        if role == "prefill":
            self.computing.add(name)
        self._pending.append(name)

        def start() -> None:
            if name in self._pending:
                self._pending.remove(name)
                self._start(name, 1, random.Random(f"{self.setup.seed}/faults/{name}"))

        self.clock.after(round(self.setup.start_s * 1e9), start)

    def _remove(self, role: Role) -> None:
        starting = [name for name in self._pending if self.roles[name] == role]
        if starting:
            self._pending.remove(starting[-1])
            self.left_ns[starting[-1]] = self.clock.now_ns
            return
        able = [slot.worker_id for slot in self._table.of_role(role)]
        leaves = min(able, key=lambda name: self._table.worker(name).status().answering)
        worker = self._table.worker(leaves)
        self.router.on_leaving(leaves)
        self._leave_when_free(worker)

    def _leave_when_free(self, worker: SimulatedWorker) -> None:
        if not self._table.is_live(worker.worker_id):
            return
        if self.router.uses(worker):
            self.clock.after(1_000_000_000, partial(self._leave_when_free, worker))
            return
        self.left_ns[worker.worker_id] = self.clock.now_ns
        self.router.on_left(worker)

    @property
    def worker_s(self) -> float:
        """Time for which workers were there, starts included."""
        until_ns = self._last_arrival_ns
        times_ns = [
            max(min(self.left_ns.get(name, until_ns), until_ns) - added_ns, 0)
            for name, added_ns in self.added_ns.items()
        ]
        return sum(times_ns) / 1e9

    def _check_pools(self) -> None:
        setup = self.setup
        if setup.prefill_kv_tokens != setup.decode_kv_tokens:
            raise ValueError(
                f"pools of {setup.prefill_kv_tokens} and {setup.decode_kv_tokens} tokens: "
                "workers that change their role need pools of one size; give --prefill-kv-tokens "
                "and --decode-kv-tokens the same number"
            )

    def change_role(self, worker_id: str, role: Role) -> None:
        """Give a worker another role; what runs at it ends there, and its cache stays.

        Raises:
            ValueError: Pools of prefill and decode workers differ in size.
        """
        self._check_pools()
        self.turns += 1
        self.wanted[self.roles[worker_id]] -= 1
        self.wanted[role] += 1
        self.roles[worker_id] = role
        if role == "prefill":
            self.computing.add(worker_id)
        self.clock.after(TURN_NS, partial(self.router.on_turned, worker_id, role))

    def _start(self, worker_id: str, epoch: int, draw: random.Random) -> None:
        setup = self.setup
        role = self.roles[worker_id]
        worker = SimulatedWorker(
            worker_id,
            epoch,
            setup.worker(prefill=role == "prefill"),
            clock=self.clock,
            listener=self.router,
            host=self._network.node(worker_id),
        )
        self.lives.append(worker)
        self.router.on_live(worker, role)
        if not setup.mtbf_s:
            return
        death_ns = self.clock.now_ns + round(draw.expovariate(1 / setup.mtbf_s) * 1e9)
        if death_ns < self._last_arrival_ns:
            self.clock.at(death_ns, partial(self._die, worker, epoch, draw))

    def _die(self, worker: SimulatedWorker, epoch: int, draw: random.Random) -> None:
        if worker.worker_id in self.left_ns:
            return
        worker.die()
        self.clock.after(DETECT_NS, partial(self.router.on_dead, worker))
        again = partial(self._start, worker.worker_id, epoch + 1, draw)
        self.clock.after(DETECT_NS + round(self.setup.repair_s * 1e9), again)

    def _records(self, trace: Sequence[TraceRequest]) -> list[Record]:
        setup = self.setup
        draw = random.Random(f"{self.setup.seed}/arrivals")
        # A place in a graph is that of a record: it keeps the trace's order.
        spread_s = setup.spread_s if self._frontier is None else 0.0
        arrivals_ns = [
            round((request.arrival_s + draw.random() * spread_s) / setup.speed * 1e9)
            for request in trace
        ]
        order = sorted(range(len(trace)), key=lambda index: (arrivals_ns[index], index))
        return [self._record(index, trace[index], arrivals_ns[index]) for index in order]

    def _record(self, index: int, request: TraceRequest, arrival_ns: int) -> Record:
        setup = self.setup
        colocated = not setup.prefill_workers
        blocks = -(-request.input_tokens // setup.block_tokens)
        full_blocks = request.input_tokens // setup.block_tokens
        # Without hashes in the trace, no two prompts share a prefix.
        names = request.block_hashes or [f"{index}/{block}" for block in range(blocks)]
        hashes = [blake2b(str(name).encode(), digest_size=16).digest() for name in names]
        return Record(
            request=GenerationRequest(
                request_id=f"r{index}",
                prompt=_prompt(request.input_tokens),
                sampling=_SAMPLING,
                mode="colocated" if colocated else setup.mode,
                arrived_ns=arrival_ns,
                deadline_ns=1 << 62,
                slo=setup.slo,
            ),
            sent_ns=arrival_ns,
            answer_tokens=max(request.output_tokens, 1),
            hashes=hashes[:full_blocks],
            blocks=len(names),
        )


@cache
def _prompt(tokens: int) -> tuple[int, ...]:
    """Return a prompt of this length, shared by all requests of it: days of a trace are long."""
    return (0,) * tokens


_SAMPLING = SamplingParams(max_tokens=ANSWER_LIMIT_TOKENS, ignore_eos=True)
