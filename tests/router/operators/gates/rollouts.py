"""Seeded rollouts of canaries: requests with errors and latencies, judged as routers judge them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from baton.types.gates import Evidence, Tally
from baton.types.routes import NameRoute
from router.lanes.comparison import bucket_of
from router.lanes.gate import Gate

SPREAD = 0.5  # standard deviation of the logarithm of a TTFT


@dataclass(frozen=True)
class Rollout:
    """``share`` of the requests goes to the canary, whose TTFT is ``slower`` times longer."""

    share: float = 0.05
    errors: float = 0.01
    usual_errors: float = 0.01
    slower: float = 1.0
    spread: float = SPREAD
    step: int = 5  # requests of the canary between two judgements

    def run(self, seed: int, requests: int) -> tuple[int, str] | None:
        """Return after how many requests of the canary it was taken out, and why; None: never."""
        rng = np.random.default_rng(seed)
        gate = Gate("chat", NameRoute(target="v1", canary="v2", share=self.share, since_ms=1))
        totals = Evidence()
        for done in range(self.step, requests + 1, self.step):
            others = int(rng.negative_binomial(self.step, self.share))
            self._add(rng, totals.canary, self.step, self.errors, self.slower)
            self._add(rng, totals.stable, others, self.usual_errors, 1.0)
            if reason := gate.judge(totals):
                return done, reason
        return None

    def _add(
        self, rng: np.random.Generator, tally: Tally, count: int, errors: float, slower: float
    ) -> None:
        failed = int(rng.binomial(count, errors))
        tally.requests += count
        tally.errors += failed
        for counts, typical_s, spread in (
            (tally.ttft, 0.3 * slower, self.spread),
            (tally.itl, 0.02, 0.2),
        ):
            drawn = typical_s * np.exp(rng.normal(0.0, spread, count - failed))
            for took_s in drawn.tolist():
                bucket = bucket_of(took_s)
                counts[bucket] = counts.get(bucket, 0) + 1


def share_found(
    rollout: Rollout,
    requests: int,
    count: int,
    counts: Callable[[str], bool] = lambda _: True,
) -> float:
    """Return the share of ``count`` rollouts that were rolled back for a reason that ``counts``."""
    ends = (rollout.run(seed, requests) for seed in range(count))
    return sum(end is not None and counts(end[1]) for end in ends) / count
