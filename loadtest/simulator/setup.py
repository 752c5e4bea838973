"""Parameters of a simulation."""

from dataclasses import dataclass
from typing import Annotated, Literal

from typer import Option

from baton.engine.core.scheduler import SchedulerConfig
from baton.engine.emulated_timing import H100_70B, WorkerTiming
from baton.types.geometry import KvGeometry
from baton.types.slo import Slo
from loadtest.simulator.network import LINKS, Link
from loadtest.simulator.policies import FLEET
from loadtest.simulator.worker import LAYER_GROUPS, WorkerModel
from loadtest.workloads.traces import MOONCAKE_BLOCK_TOKENS
from router.request import Mode
from router.settings import LaneSettings

Plan = Literal["fixed", "auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Parameters of a simulation. The annotated ones are options of ``baton simulate``."""

    prefill_workers: Annotated[
        int, Option("--prefill", min=0, help="Number of prefill workers; 0 for a colocated fleet.")
    ] = 8
    decode_workers: Annotated[int, Option("--decode", min=1, help="Number of decode workers.")] = 8
    policy: str = FLEET  # routing policy: ``fleet``, or one of ``POLICIES``
    mode: Annotated[Mode, Option(help="Mode of the requests.")] = "disaggregated"
    timing: WorkerTiming = H100_70B
    link: Link = LINKS["between-nodes"]  # link between two nodes
    nodes: Annotated[
        int, Option(min=0, help="Nodes with NVLink inside; 0 for one node per worker.")
    ] = 0
    prefill_kv_tokens: Annotated[int, Option(min=1024, help="Pool size of a prefill worker.")] = (
        3_100_160
    )
    decode_kv_tokens: Annotated[int, Option(min=1024, help="Pool size of a decode worker.")] = (
        1_048_576
    )
    memory_kv_tokens: Annotated[
        int, Option(min=0, help="Memory tier of each prefill worker; 0 for none.")
    ] = 0
    memory_bytes_per_s: float = 20e9  # between tier and pool: a PCIe 4 x16 slot
    block_tokens: int = MOONCAKE_BLOCK_TOKENS  # of all pools, as in the trace's hashes
    max_batch_requests: Annotated[
        int, Option("--batch", min=1, help="Sequences that a worker runs at once.")
    ] = 64
    max_step_tokens: int = 8192
    max_queued_requests: int = 256
    pull_prefixes: Annotated[
        bool, Option("--pull/--no-pull", help="Let workers pull prefixes from each other.")
    ] = True
    spread_s: Annotated[
        float, Option(min=0, help="Seconds from its tick on over which an arrival is drawn.")
    ] = 3.0  # Mooncake's ticks are 3 s apart
    plan: Annotated[
        Plan, Option(help="Roles of workers: fixed, or changed by the planner (auto).")
    ] = "fixed"
    min_workers: Annotated[
        int, Option(min=2, help="Least number of workers with --plan auto and --max-workers.")
    ] = 2
    max_workers: Annotated[
        int, Option(min=0, help="Largest number of workers; 0: the planner changes only roles.")
    ] = 0
    start_s: Annotated[float, Option(min=0, help="Seconds until an added worker is ready.")] = 30.0
    slo: Slo | None = None  # limits by which the router admits requests; None: it admits all
    tries: Annotated[
        int, Option(min=1, help="Number of tries of a client, which comes again after Retry-After.")
    ] = 1
    speed: Annotated[float, Option(min=0.001, help="Divisor of the gaps between arrivals.")] = 1.0
    mtbf_s: Annotated[
        float, Option(min=0, help="Mean seconds until a worker dies; 0 for never.")
    ] = 0.0
    repair_s: Annotated[float, Option(min=0, help="Seconds until a dead worker is replaced.")] = (
        30.0
    )
    seed: Annotated[int, Option(help="Random seed.")] = 0
    check_every_step: bool = False  # recount all blocks after each step (tests)

    def worker(self, *, prefill: bool) -> WorkerModel:
        """Return the model of a worker of one role."""
        kv_tokens = self.prefill_kv_tokens if prefill else self.decode_kv_tokens
        block_bytes = self.block_tokens * self.timing.kv_bytes_per_token
        return WorkerModel(
            timing=self.timing,
            geometry=KvGeometry(
                num_layers=LAYER_GROUPS,
                num_kv_heads=1,
                head_dim=1,
                num_blocks=kv_tokens // self.block_tokens,
                dtype="bf16",
                block_tokens=self.block_tokens,
            ),
            config=SchedulerConfig(self.max_batch_requests, self.max_step_tokens),
            memory_blocks=self.memory_kv_tokens // self.block_tokens if prefill else 0,
            copy_ns=round(block_bytes / self.memory_bytes_per_s * 1e9),
            check_every_step=self.check_every_step,
        )

    def router(self) -> LaneSettings:
        """Return the settings of the router."""
        return LaneSettings(
            model="simulated",
            model_names=("simulated",),
            max_queued_requests=self.max_queued_requests,
            window_requests=self.max_batch_requests,
            pull_prefixes=self.pull_prefixes,
        )
