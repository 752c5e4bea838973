"""Decides the roles of workers, and their number, so that latency limits are kept. Sans-IO.

    demand of routers ──▶ needs in workers ──▶ split with the largest flow ──▶ turn one worker
    waiting prompts, streams of now ─────────▶ veto, alarm ───────┘

Arrivals decide where to go: the time of their prompts and the length of their responses give the
flow of requests that each split serves. A turn is made when the present split misses or is about
to, and the best one serves a tenth more. What waits and runs now may forbid a turn that takes a
worker from a role in distress, and may order one that arrivals do not show yet. The decode workers'
load is what arrives and what waits for prefill, not only the streams of now: with these alone, the
planner would take decode workers away while prompts wait, and give them back after.

With bounds, the fleet also grows and shrinks (`baton.planner.sizes`), after what turns can do.

There is no forecast.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from math import exp, inf

import msgspec

from baton.planner.sizes import SizePlanner
from baton.planner.state import (
    PREFILL_SHARE,
    Decision,
    Figures,
    Nothing,
    Resize,
    RoleChange,
    WorkerState,
    usual_decode_line,
    usual_prompt_line,
)
from baton.registry.types import PromptSum, Role, WorkDemand
from baton.types.slo import Slo
from baton.types.step_lines import DecodeLine, PromptLine

DECODE_SHARE = 0.85
"""Share of the ITL limit for which decode workers are planned."""

GAIN = 1.1
"""Flow of the best split that is worth a turn, in multiples of the present one's."""

_MISSES = 0.9  # load of a role, in its workers, above which it is about to miss
_HOLDS = 0.9  # load of a role that gives a worker away, after that
_WAIT_ALARM = 0.5  # of the TTFT limit: prompts wait so long that prefill is in distress
_WAIT_CALM = 0.15  # of the same: prefill may give a worker away
_CLEAR_S = 30.0  # time in which prompts that wait should be computed
_LEAST_REQUESTS = 8.0
_SURE_REQUESTS = 64.0  # whose mean prompt limits the flow to decode; a few long ones mislead
_AGREE_NS = 6_000_000_000  # for which looks have to agree, unless prompts wait long
_WORKERS_PER_TURN = 8  # of the fleet: in that time it turns one of so many, since effects take time
_TURNS_KEPT = 1024
_TURNS_PER_WORKER = 2
_TURNS_WITHIN_NS = 60_000_000_000
_PENDING_NS = 10_000_000_000  # after which a turn without effect is given up
MEMORY_S = 30.0
"""Time in which the weight of what was observed falls to 1 / e."""

MEMORY_REQUESTS = 400.0
"""The same in requests: with many of them, less time is enough."""

_PRIOR_RESPONSES = 8.0  # in the mean length of responses, until there are enough
_PRIOR_TOKENS = 256.0


class Planner:
    """Planner of one fleet. Call ``observe``, then ``decide``, every few seconds."""

    def __init__(self, limits: Slo, sizes: SizePlanner | None = None) -> None:
        self._limits = limits
        self._sizes = sizes
        self._window = DemandWindow()
        self._demands: Mapping[str, WorkDemand] = {}
        self._workers: Sequence[WorkerState] = ()
        self._pending: tuple[str, Role, int] | None = None
        self._turns_ns: dict[str, deque[int]] = {}
        self._latest_ns: deque[int] = deque(maxlen=_TURNS_KEPT)
        self._direction: Role | None = None
        self._since_ns = 0

    def observe(
        self, demands: Mapping[str, WorkDemand], workers: Sequence[WorkerState], now_ns: int
    ) -> None:
        """Note the demand of each router, and the ready workers."""
        self._window.observe(demands, now_ns)
        self._demands = demands
        self._workers = sorted(workers, key=lambda worker: worker.worker_id)
        if self._sizes is not None:
            self._sizes.observe(demands, now_ns)

    def decide(self, now_ns: int, wanted: Mapping[Role, int] | None = None) -> Decision:
        """Return one turn, new sizes, or the reason for neither.

        ``wanted`` are the sizes that were asked for last, which the fleet may not have yet.
        """
        if self._is_pending(now_ns):
            return Nothing(reason="a turn is pending")
        figures = self._figures()
        known = None if isinstance(figures, str) else figures
        turn = self._decide_turn(figures, now_ns)
        if self._sizes is None or wanted is None or isinstance(turn, RoleChange):
            return turn
        light = self._window.arrived.count < _LEAST_REQUESTS
        wish = self._sizes.decide(wanted, known, self._demands, now_ns, light=light)
        if isinstance(wish, Resize):
            self._direction = None
            return msgspec.structs.replace(wish, figures=known)
        return Nothing(reason=f"{turn.reason}; {wish}", figures=known)

    def _decide_turn(self, figures: Figures | str, now_ns: int) -> RoleChange | Nothing:
        if isinstance(figures, str):
            self._direction = None
            return Nothing(reason=figures)
        if not figures.prefill or not figures.decode:
            return Nothing(
                reason=f"{figures.prefill} prefill and {figures.decode} decode workers are ready: "
                "a turn needs both roles",
                figures=figures,
            )
        role, reason = self._choose_role(figures)
        urgent = role == "prefill" and self._waits(figures) >= _WAIT_ALARM
        if role != self._direction:
            self._direction = role
            self._since_ns = now_ns
        if role is None:
            return Nothing(reason=reason, figures=figures)
        if now_ns - self._since_ns < _AGREE_NS and not urgent:
            return Nothing(reason=f"one more look: {reason}", figures=figures)
        recent = sum(now_ns - turn_ns < _AGREE_NS for turn_ns in self._latest_ns)
        if recent >= max(len(self._workers) // _WORKERS_PER_TURN, 1):
            return Nothing(reason=f"the last turn has had no effect yet: {reason}", figures=figures)
        worker = self._worker_to_turn(role, now_ns)
        if worker is None:
            return Nothing(reason=f"every worker has just turned: {reason}", figures=figures)
        self._latest_ns.append(now_ns)
        self._turns_ns.setdefault(worker.worker_id, deque(maxlen=_TURNS_PER_WORKER)).append(now_ns)
        self._pending = (worker.worker_id, role, now_ns)
        return RoleChange(worker_id=worker.worker_id, role=role, reason=reason, figures=figures)

    def _is_pending(self, now_ns: int) -> bool:
        if self._pending is None:
            return False
        worker_id, role, since_ns = self._pending
        seen = any(one.worker_id == worker_id and one.role == role for one in self._workers)
        if seen or now_ns - since_ns >= _PENDING_NS:
            self._pending = None
        return self._pending is not None

    def _worker_to_turn(self, role: Role, now_ns: int) -> WorkerState | None:
        """Return the worker of the other role with the least work."""
        able = []
        for worker in self._workers:
            turns_ns = self._turns_ns.get(worker.worker_id, ())
            recent = sum(now_ns - turn_ns < _TURNS_WITHIN_NS for turn_ns in turns_ns)
            if worker.role != role and recent < _TURNS_PER_WORKER:
                able.append(worker)
        return min(able, key=lambda one: (one.streams, one.queued_tokens), default=None)

    def _figures(self) -> Figures | str:
        """Return the figures of now, or why there are none."""
        window = self._window
        prefill = sum(worker.role == "prefill" for worker in self._workers)
        decode = len(self._workers) - prefill
        if not self._workers:
            return "no worker is ready"
        prompt_line = usual_prompt_line(self._workers)
        decode_line = usual_decode_line(self._workers)
        if prompt_line is None or decode_line is None:
            return "no worker has measured its steps yet"
        count = window.arrived.count
        if count < _LEAST_REQUESTS:
            return f"too little load: {count:.0f} requests have arrived lately"
        rate = count / window.span_s
        miss_share = window.miss_share(prompt_line)
        prompt_s = window.arrived.seconds(prompt_line) / count * miss_share
        output_tokens = window.tokens_per_response()
        context = window.arrived.tokens / count + output_tokens / 2
        flow = self._decode_flow(decode_line, context, output_tokens)
        if not flow:
            return (
                f"a decode step takes {decode_line.step_s:g} s without any stream, more than "
                f"{DECODE_SHARE:g} of the limit of {self._limits.itl_s:g} s"
            )
        return Figures(
            prefill=prefill,
            decode=decode,
            requests=round(count, 1),
            requests_per_s=round(rate, 4),
            prompt_s=round(prompt_s, 6),
            miss_share=round(miss_share, 4),
            output_tokens=round(output_tokens, 1),
            prefill_need=round(rate * prompt_s / PREFILL_SHARE, 4),
            decode_need=round(rate / flow, 4),
            prefill_wait_s=round(self._waiting_s(prompt_line, miss_share) / (prefill or decode), 4),
            decode_now=round(self._decode_now(decode_line), 4),
        )

    @property
    def _max_streams(self) -> int:
        return min(worker.max_streams for worker in self._workers)

    def _decode_flow(self, line: DecodeLine, context: float, output_tokens: float) -> float:
        """Return the requests per second that one decode worker generates within the limit."""
        limit_s = DECODE_SHARE * self._limits.itl_s
        rows = line.rows_within(limit_s, context)
        if rows > self._max_streams:
            rows = self._max_streams
            limit_s = line.seconds(rows, rows * context)
        return rows / limit_s / output_tokens

    def _waiting_s(self, line: PromptLine, miss_share: float) -> float:
        total_s = 0.0
        for demand in self._demands.values():
            total_s += _seconds(line, demand.waiting) * miss_share
            total_s += _seconds(line, demand.computing)
        return total_s

    def _decode_now(self, line: DecodeLine) -> float:
        streams = sum(demand.streams for demand in self._demands.values())
        tokens = sum(demand.stream_tokens for demand in self._demands.values())
        room_s = DECODE_SHARE * self._limits.itl_s - line.step_s
        by_time = (streams * line.row_s + tokens * line.context_s) / room_s
        return max(by_time, streams / self._max_streams)

    def _choose_role(self, figures: Figures) -> tuple[Role | None, str]:
        """Return the role that needs one more worker and can have it, and the reason."""
        split = f"{figures.prefill} + {figures.decode}"
        needs = f"{figures.prefill_need:.2f} + {figures.decode_need:.2f}"
        waits = self._waits(figures)
        full = figures.decode_now / figures.decode
        load = _load(figures, figures.prefill)
        if load < _MISSES and waits < _WAIT_ALARM and full < 1.0:
            return None, f"{split} holds the load, which needs {needs}"
        total = figures.prefill + figures.decode
        best, _ = best_split(figures)
        gains = load / _load(figures, best) >= GAIN
        misses = f"{split} misses: the load needs {needs}"
        if load < _MISSES:
            misses = f"streams fill {figures.decode_now:.2f} decode workers at {split}"
            if waits >= _WAIT_ALARM:
                misses = f"prompts wait {figures.prefill_wait_s:.1f} s at {split}"
        if gains and best > figures.prefill:
            if self._decode_load_after(figures) < 1.0:
                return "prefill", misses
            return None, f"{misses}, but decode would be full"
        if gains:
            # A load that decode cannot hold makes prompts wait at the gate, whatever prefill does.
            if waits < _WAIT_CALM or full >= 1.0 or load >= 1.0:
                return "decode", misses
            return None, f"{misses}, but prompts wait now"
        if waits >= _WAIT_ALARM and full < 1.0 and self._decode_load_after(figures) < _HOLDS:
            return "prefill", f"prompts wait {figures.prefill_wait_s:.1f} s at {split}"
        if full >= 1.0 and waits < _WAIT_CALM and self._prefill_load_after(figures) < _HOLDS:
            return "decode", f"streams fill {figures.decode_now:.2f} decode workers at {split}"
        if load >= 1.0:
            return None, f"no split of {total} workers holds the load: it needs {needs}"
        return None, f"{split} is the best split for a load that needs {needs}"

    def _waits(self, figures: Figures) -> float:
        """Return the time that prompts wait, in multiples of the TTFT limit."""
        return figures.prefill_wait_s / self._limits.ttft_s

    def _decode_load_after(self, figures: Figures) -> float:
        """Return the load of decode with one worker fewer, and prefill with one more.

        Prompts that wait become streams as fast as prefill computes them then.
        """
        left = figures.decode - 1
        if not left:
            return inf
        prompt_s = max(figures.prompt_s, 1e-9)
        waiting = figures.prefill_wait_s * figures.prefill / prompt_s
        rate = figures.requests_per_s + waiting / _CLEAR_S
        if figures.requests >= _SURE_REQUESTS:
            rate = min(rate, (figures.prefill + 1) / prompt_s)
        need = figures.decode_need * rate / figures.requests_per_s
        return max(need, figures.decode_now) / left

    def _prefill_load_after(self, figures: Figures) -> float:
        """Return the load of prefill with one worker fewer."""
        left = figures.prefill - 1
        return figures.prefill_need / left if left else inf


def best_split(figures: Figures) -> tuple[int, float]:
    """Return the prefill workers of the split with the largest flow, and its load.

    There must be two workers or more.
    """
    total = figures.prefill + figures.decode
    best = min(range(1, total), key=lambda prefill: _load(figures, prefill))
    return best, _load(figures, best)


def _load(figures: Figures, prefill: int) -> float:
    """Return the load of the fuller role with this number of prefill workers.

    The inverse is the flow of requests that the split serves, in multiples of what arrives.
    """
    decode = figures.prefill + figures.decode - prefill
    return max(figures.prefill_need / prefill, figures.decode_need / decode)


def _seconds(line: PromptLine, prompts: PromptSum) -> float:
    return line.seconds(prompts.tokens, prompts.context)


class _Prompts:
    """Decaying sum over prompts."""

    def __init__(self) -> None:
        self.count = 0.0
        self.tokens = 0.0
        self.context = 0.0

    def decay(self, kept: float) -> None:
        self.count *= kept
        self.tokens *= kept
        self.context *= kept

    def add(self, now: PromptSum, before: PromptSum) -> None:
        self.count += now.count - before.count
        self.tokens += now.tokens - before.tokens
        self.context += now.context - before.context

    def seconds(self, line: PromptLine) -> float:
        return line.seconds(self.tokens, self.context)


class DemandWindow:
    """Recent demand at all routers together, from the sums that they report.

    These decay with time, so that rates and lengths follow the load, and an idle fleet forgets.
    """

    def __init__(self) -> None:
        self._before: dict[str, WorkDemand] = {}
        self._observed_ns: int | None = None
        self.arrived = _Prompts()
        self.placed = _Prompts()
        self.uncached = _Prompts()
        self.responses = 0.0
        self.output_tokens = 0.0
        self.span_s = 0.0  # weight of the observed time

    def observe(self, demands: Mapping[str, WorkDemand], now_ns: int) -> None:
        """Add what each router has counted since the last call; a new router counts from now on."""
        if self._observed_ns is not None:
            pairs = self._pairs(demands)
            arrived = sum(now.arrived.count - before.arrived.count for now, before in pairs)
            self._decay((now_ns - self._observed_ns) / 1e9, arrived)
            for now, before in pairs:
                self._add(now, before)
        self._observed_ns = now_ns
        self._before = dict(demands)

    def _pairs(self, demands: Mapping[str, WorkDemand]) -> list[tuple[WorkDemand, WorkDemand]]:
        """Return sums of now and before, without those of routers that are new."""
        pairs = [
            (now, self._before[router_id])
            for router_id, now in demands.items()
            if router_id in self._before
        ]
        return [(now, before) for now, before in pairs if before.arrived.count <= now.arrived.count]

    def _decay(self, seconds: float, arrived: int) -> None:
        kept = exp(-seconds / MEMORY_S - arrived / MEMORY_REQUESTS)
        for prompts in (self.arrived, self.placed, self.uncached):
            prompts.decay(kept)
        self.responses *= kept
        self.output_tokens *= kept
        self.span_s = self.span_s * kept + seconds

    def _add(self, now: WorkDemand, before: WorkDemand) -> None:
        self.arrived.add(now.arrived, before.arrived)
        self.placed.add(now.placed, before.placed)
        self.uncached.add(now.uncached, before.uncached)
        self.responses += now.responses - before.responses
        self.output_tokens += now.output_tokens - before.output_tokens

    def miss_share(self, line: PromptLine) -> float:
        """Return the share of prompts' time that is not saved by caches."""
        whole_s = self.placed.seconds(line)
        return self.uncached.seconds(line) / whole_s if whole_s else 1.0

    def tokens_per_response(self) -> float:
        """Return the mean length of responses, by the rate at which generating ones end.

        Tokens of those that still run count, so it grows with their age, long before they end.
        """
        tokens = self.output_tokens + _PRIOR_RESPONSES * _PRIOR_TOKENS
        return tokens / (self.responses + _PRIOR_RESPONSES)
