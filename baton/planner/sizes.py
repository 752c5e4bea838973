"""Decides how many workers each role gets, within the bounds of the fleet file. Sans-IO.

Growth is one worker a minute, or a quarter of the fleet while prompts wait that it will not compute
soon. A worker leaves only if the fleet would have held the mean load of ten minutes without it, and
has not grown in them. A fleet that may end all its workers does so after ten minutes without a
request, and starts again as soon as one waits.

Needs of few requests vary with each long prompt. Until there are many, only work that is there
counts for growth: streams, and prompts that wait. A single long prompt is no reason to grow.

The role of an added worker is the one with the higher load; turns balance the rest.
"""

from collections import deque
from collections.abc import Mapping
from math import ceil, inf

from baton.planner.state import PREFILL_SHARE, Figures, Resize
from baton.registry.types import Role, WorkDemand

SCALE_IN_AFTER_NS = 600_000_000_000
"""Time whose mean load must be low before a worker leaves."""

_EVERY_NS = 60_000_000_000  # between two changes of the sizes
_FULL = 0.9  # load of a role above which it gets a worker
_LOW = 0.7  # load of each role with one worker fewer, below which one leaves
_FASTER = 0.25  # share of the fleet that is added at once while prompts wait
_SOON = 3.0  # multiple of the TTFT limit within which prompts that wait should be computed
_LONG_NS = 30_000_000_000  # for which they wait before a worker is added: it takes time to start
_SURE_REQUESTS = 64.0  # whose needs are not those of a few long prompts
_LEAST_SPARE = 0.05  # share of a worker's time that is left for prompts that wait
_KNOWN = 0.5  # share of the looks that a mean needs
_LOOK_NS = 2_000_000_000

Sizes = dict[Role, int]


class SizePlanner:
    """Sizes of one fleet.

    Args:
        least: Smallest number of workers of both roles together.
        most: Largest number of them.
        first: Sizes with which a fleet without workers starts again.
        ttft_s: Latency limit of first tokens.
    """

    def __init__(
        self,
        least: int,
        most: int,
        first: Mapping[Role, int],
        ttft_s: float,
        scale_in_after_ns: int = SCALE_IN_AFTER_NS,
    ) -> None:
        self._least = least
        self._most = most
        self._colocated = not first.get("prefill", 0) and bool(first.get("decode", 0))
        self._first = first
        self._ttft_s = ttft_s
        self._after_ns = scale_in_after_ns
        self._changed_ns: int | None = None
        self._grown_ns: int | None = None
        self._waits_since_ns: int | None = None
        self._needs: deque[tuple[int, float, float]] = deque()  # time, and needs of each role
        self._busy_ns: int | None = None  # when a request was seen last
        self._arrived: dict[str, int] = {}

    def observe(self, demands: Mapping[str, WorkDemand], now_ns: int) -> None:
        """Note whether any request has arrived, waits or runs."""
        arrived = {name: demand.arrived.count for name, demand in demands.items()}
        new = any(count > self._arrived.get(name, count) for name, count in arrived.items())
        held = any(
            one.waiting.count or one.streams or one.computing.count for one in demands.values()
        )
        if new or held or self._busy_ns is None:
            self._busy_ns = now_ns
        self._arrived = arrived

    def decide(
        self,
        sizes: Mapping[Role, int],
        figures: Figures | None,
        demands: Mapping[str, WorkDemand],
        now_ns: int,
        *,
        light: bool = False,
    ) -> Resize | str:
        """Return new sizes, or why they stay; ``sizes`` are those that were wanted last.

        Without ``figures``, the load is ``light`` or unknown.
        """
        total = sum(sizes.values())
        if not total:
            return self._from_zero(demands, now_ns)
        if total < self._least:
            return self._grown(sizes, figures, self._least - total, "the least size", now_ns)
        if total > self._most:
            needs = (0.0, 0.0)
            if figures is not None:
                needs = (figures.prefill_need, figures.most_decode)
            role = self._role_to_shrink(sizes, needs, limit=inf) or "prefill"
            return self._shrunk(sizes, role, f"at most {self._most} are allowed", now_ns)
        idle_ns = now_ns - (now_ns if self._busy_ns is None else self._busy_ns)
        if not self._least and idle_ns >= self._after_ns:
            self._changed_ns = now_ns
            return _resize({}, f"no request for {idle_ns / 1e9:.0f} s")
        light = light and not _waiting(demands)
        self._note_needs(figures, light, now_ns)
        if figures is None or not self._waits_long(sizes, figures):
            self._waits_since_ns = None
        elif self._waits_since_ns is None:
            self._waits_since_ns = now_ns
        if figures is not None and (why := self._lacks(sizes, figures, now_ns)):
            if total == self._most:
                return f"{why}, but at most {total} workers are allowed"
            if not self._may_change(now_ns):
                return f"{why}; the last change of the sizes is less than a minute ago"
            step = max(ceil(_FASTER * total), 1) if self._waits_long(sizes, figures) else 1
            return self._grown(sizes, figures, min(step, self._most - total), why, now_ns)
        if figures is None and not light:
            return "the load is not known"
        return self._when_low(sizes, figures, now_ns)

    def _from_zero(self, demands: Mapping[str, WorkDemand], now_ns: int) -> Resize | str:
        waiting = _waiting(demands)
        if not waiting and not self._least:
            return "no request waits"
        first: Sizes = {role: self._first.get(role, 0) for role in ("prefill", "decode")}
        first["decode"] = max(first["decode"], 1)
        if sum(first.values()) > self._most:
            first = {"prefill": 0, "decode": 1}
        self._changed_ns = now_ns
        return _resize(first, f"{waiting} requests wait for a first worker")

    def _lacks(self, sizes: Mapping[Role, int], figures: Figures, now_ns: int) -> str:
        """Return why the fleet should grow, or ""."""
        if figures.requests >= _SURE_REQUESTS and self._load(sizes, figures) > _FULL:
            needs = f"{figures.prefill_need:.2f} + {figures.decode_need:.2f}"
            return f"the load needs {needs} workers"
        if figures.decode_now > _FULL * sizes.get("decode", 0):
            return f"streams fill {figures.decode_now:.2f} decode workers"
        if self._waits_since_ns is not None and now_ns - self._waits_since_ns >= _LONG_NS:
            return f"prompts wait {figures.prefill_wait_s:.1f} s"
        return ""

    def _waits_long(self, sizes: Mapping[Role, int], figures: Figures) -> bool:
        """Return whether prompts wait that the fleet will not compute soon, beside new ones."""
        computing = sizes.get("prefill", 0) or sizes.get("decode", 0)
        spare = max(1.0 - PREFILL_SHARE * figures.prefill_need / max(computing, 1), _LEAST_SPARE)
        waits = figures.prefill_wait_s >= self._ttft_s
        return waits and figures.prefill_wait_s / spare >= _SOON * self._ttft_s

    def _note_needs(self, figures: Figures | None, light: bool, now_ns: int) -> None:
        if figures is not None:
            self._needs.append((now_ns, figures.prefill_need, figures.most_decode))
        elif light:
            self._needs.append((now_ns, 0.0, 0.0))
        while self._needs and now_ns - self._needs[0][0] > self._after_ns:
            self._needs.popleft()

    def _when_low(
        self, sizes: Mapping[Role, int], figures: Figures | None, now_ns: int
    ) -> Resize | str:
        """Return smaller sizes once the mean load has been low for long enough."""
        if sum(sizes.values()) <= max(self._least, 1):
            return "the sizes fit the load"
        looks = self._after_ns // _LOOK_NS
        known_ns = now_ns - self._needs[0][0] if self._needs else 0
        if known_ns < self._after_ns - 2 * _LOOK_NS or len(self._needs) < _KNOWN * looks:
            return "the load is not known for long enough"
        count = len(self._needs)
        prefill_need = sum(need for _, need, _ in self._needs) / count
        decode_need = sum(need for _, _, need in self._needs) / count
        role = self._role_to_shrink(sizes, (prefill_need, decode_need))
        if role is None or (figures is not None and self._waits_long(sizes, figures)):
            return "the sizes fit the load"
        if self._grown_ns is not None and now_ns - self._grown_ns < self._after_ns:
            return "the load is low, but the fleet has grown lately"
        if not self._may_change(now_ns):
            return "the load is low; the last change of the sizes is less than a minute ago"
        why = f"on average the load needs {prefill_need:.2f} + {decode_need:.2f} workers"
        return self._shrunk(sizes, role, why, now_ns)

    def _grown(
        self,
        sizes: Mapping[Role, int],
        figures: Figures | None,
        step: int,
        why: str,
        now_ns: int,
    ) -> Resize:
        grown: Sizes = dict(sizes)
        for _ in range(step):
            role = self._role_to_grow(grown, figures)
            grown[role] = grown.get(role, 0) + 1
        self._changed_ns = now_ns
        self._grown_ns = now_ns
        return _resize(grown, why)

    def _role_to_grow(self, sizes: Mapping[Role, int], figures: Figures | None) -> Role:
        if self._colocated or not sizes.get("decode", 0):
            return "decode"
        if not sizes.get("prefill", 0):
            return "prefill"
        if figures is None:
            return "prefill" if sizes["prefill"] < sizes["decode"] else "decode"
        if self._load(sizes, figures) <= _FULL:  # only prompts that wait ask for a worker
            return "prefill"
        prefill_load = figures.prefill_need / sizes["prefill"]
        decode_load = figures.most_decode / sizes["decode"]
        return "prefill" if prefill_load >= decode_load else "decode"

    def _shrunk(self, sizes: Mapping[Role, int], role: Role, why: str, now_ns: int) -> Resize:
        self._changed_ns = now_ns
        return _resize({**sizes, role: sizes[role] - 1}, why)

    def _role_to_shrink(
        self, sizes: Mapping[Role, int], needs: tuple[float, float], limit: float = _LOW
    ) -> Role | None:
        """Return the role that can lose a worker best, if the load stays below the limit."""
        left: dict[Role, float] = {}
        roles: tuple[Role, ...] = ("prefill", "decode")
        for role in roles:
            after = {**sizes, role: sizes.get(role, 0) - 1}
            if after[role] >= 0 and after["decode"] and self._may_split(after):
                left[role] = _load_of(after, *needs)
        best = min(left, key=lambda role: (left[role], -sizes[role]), default=None)
        return best if best is not None and left[best] <= limit else None

    def _may_split(self, sizes: Mapping[Role, int]) -> bool:
        """Return whether a pool may be empty: only in a colocated fleet, or beside one worker."""
        return bool(sizes.get("prefill", 0)) or self._colocated or sizes["decode"] == 1

    def _load(self, sizes: Mapping[Role, int], figures: Figures) -> float:
        return _load_of(sizes, figures.prefill_need, figures.most_decode)

    def _may_change(self, now_ns: int) -> bool:
        return self._changed_ns is None or now_ns - self._changed_ns >= _EVERY_NS


def _resize(sizes: Mapping[Role, int], reason: str) -> Resize:
    return Resize(prefill=sizes.get("prefill", 0), decode=sizes.get("decode", 0), reason=reason)


def _waiting(demands: Mapping[str, WorkDemand]) -> int:
    """Return the number of prompts that wait at all routers."""
    return sum(demand.waiting.count for demand in demands.values())


def _load_of(sizes: Mapping[Role, int], prefill_need: float, decode_need: float) -> float:
    """Return the load of the fuller role; decode workers alone compute prompts too."""
    prefill = sizes.get("prefill", 0)
    decode = sizes.get("decode", 0)
    if not decode:
        return inf
    if not prefill:
        return (prefill_need + decode_need) / decode
    return max(prefill_need / prefill, decode_need / decode)
