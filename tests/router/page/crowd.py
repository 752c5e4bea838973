"""A fleet of any size for the live page: slots whose links have a status and no network."""

import random
import time
from dataclasses import dataclass

from batonpb import common_pb2 as common

from tests.router.requests.fake_links import FakeLink


@dataclass
class Crowd:
    """Workers ``prefill-N`` and ``decode-N`` with their load, and ten minutes of traffic."""

    fleet: object
    prefill: int
    decode: int
    busy: bool = True

    def __post_init__(self) -> None:
        self.random = random.Random(7)
        gateway = self.fleet.lane.gateway
        self.names = [f"prefill-{n}" for n in range(self.prefill)]
        self.names += [f"decode-{n}" for n in range(self.decode)]
        self.links = {name: FakeLink(gateway, name) for name in self.names}
        for slot in gateway.workers:
            slot.on_change()
        self.move()

    def move(self) -> None:
        """Give each worker another load, as its heartbeats would."""
        for link in self.links.values():
            leased = int(900 * self.random.random() ** 2) if self.busy else 0
            status = link.status
            status.running = leased // 40
            status.waiting = int(self.random.random() > 0.9) if self.busy else 0
            blocks = {"leased": leased, "cached": min(400, 1000 - leased)}
            status.kv_blocks.CopyFrom(
                common.BlockCounts(total=1000, free=1000 - sum(blocks.values()), **blocks)
            )
            status.prefill_tokens_per_s = 3000.0
            status.decode_step_s = 0.02

    def die(self, name: str, reason: str) -> None:
        """End a worker; its slot is kept."""
        workers = self.fleet.lane.gateway.workers
        slot = workers.get(name)
        slot.link = None
        record = slot.record
        slot.record = type(record)(
            worker_id=name,
            role=record.role,
            state="dead",
            epoch=2,
            reason=reason,
            intent="park" if "operator" in reason else "serve",
        )
        slot.dead_since_ns = time.monotonic_ns()
        slot.on_change()

    def past(self, seconds: int = 600) -> None:
        """Fill the samples of the last minutes; the last one has hand-offs."""
        draw = self.random.random
        sizes = {"prefill": self.prefill, "decode": self.decode}
        series = self.fleet.router.observer.series
        for ago in range(seconds, 0, -1):
            self.serve()
            queued = int(4 * draw() ** 6)
            series.close(time.time() - ago, queued=queued, running=20, sizes=sizes)

    def serve(self) -> None:
        """Record the traffic of a second."""
        draw = self.random.random
        series = self.fleet.router.observer.series
        for _ in range(8):
            series.first_token(0.1 + draw() ** 4)
            series.tokens(0.02 + 0.02 * draw() ** 3, 20)
            series.prompt(int(300 * draw()))
            series.ended(failed=False)
            series.ended_with_limits("good" if draw() > 0.1 else "late")
            series.answered(200, failed=False)
            if self.prefill and self.decode:
                pair = [f"{role}-{int(draw() * size)}" for role, size in self.pools]
                series.handed_over(*pair)
        if draw() > 0.98:
            series.answered(503, failed=False)

    @property
    def pools(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Roles with their numbers of workers."""
        return ("prefill", self.prefill), ("decode", self.decode)
