"""Recent sessions, by the worker that computes their prompts. Sans-IO.

    turn n     [ system prompt │ … ]            its last full block is the session's tip
    turn n+1   [ system prompt │ … tip │ … ]    continues it: the tip moves

Sessions that pause for a tool or a person show no load meanwhile, so the worker that has their
common prefix looks idle and free, and gets all new ones. Their number is the load that will come.
Those with short prompts cause little of it. They are counted by themselves, so that workers that
cost the same get equally many, and their caches hold as much of each.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from baton.telemetry.running_mean import RunningMean
from router.routing.placement.block_table import HASH_BYTES

# Expected part of a turn's time by which each other session at a worker delays it.
_DELAY_SHARE = 0.2
_MOST_MORE = 20  # sessions more than at the worker with fewest that count
_KEPT_NS = 300_000_000_000  # after the last turn of a session
_MAX_SESSIONS = 65_536
_MAX_ANSWER_BLOCKS = 256  # cached behind a tip
_SERVER_BLOCKS = 16  # Baton's, of the largest usual block of a server
_TURN_WEIGHT = 0.05  # of one turn in the means


class _Turn(NamedTuple):
    worker_id: str
    at_ns: int
    is_long: bool
    continues: bool


class PromptSession(NamedTuple):
    """The session of a prompt.

    Attributes:
        tip: Its tip; empty if it begins.
        is_cached: Whether the tip is cached anywhere.
        continues: Whether the prompt is a later turn. One that is only repeated is not.
    """

    tip: bytes = b""
    is_cached: bool = False
    continues: bool = False


BEGINS = PromptSession()


class ResidentSessions:
    """Tips of recent sessions. Sessions are recognised by their prompts alone.

    Attributes:
        turn_s: Usual time to compute a turn after the first.
        continued_share: Share of these turns that are continued. They have time for it, so in the
            first minutes no session seems to end.
    """

    def __init__(self) -> None:
        self._turns: OrderedDict[bytes, _Turn] = OrderedDict()  # by tip
        self._count: Counter[str] = Counter()  # of sessions with long prompts
        self._all: Counter[str] = Counter()
        self.turn_s = RunningMean(_TURN_WEIGHT)
        self.continued_share = RunningMean(_TURN_WEIGHT, prior=1.0)

    def find(self, hashes: bytes, cached_blocks: int) -> PromptSession:
        """Return the session that a prompt continues or begins.

        Most of the prompt's blocks that are cached anywhere are ``cached_blocks``: the tip is the
        last of them, before those of the response, or soon behind them, as servers cache whole
        blocks of their own size. If it was evicted, it is near the prompt's end.
        """
        reached = cached_blocks + _SERVER_BLOCKS if cached_blocks else 0
        for end in (reached, len(hashes) // HASH_BYTES):
            for block in range(end, max(end - _MAX_ANSWER_BLOCKS, 0), -1):
                if (tip := hashes[(block - 1) * HASH_BYTES : block * HASH_BYTES]) in self._turns:
                    return PromptSession(tip, block <= reached, tip != hashes[-HASH_BYTES:])
        return BEGINS

    def note(
        self, hashes: bytes, continued: bytes, worker_id: str, now_ns: int, *, is_long: bool = True
    ) -> None:
        """Note a turn that is computed on a worker; ``continued`` is the session's former tip.

        One whose prompt is not long delays no other one.
        """
        if not hashes:
            return
        tip = hashes[-HASH_BYTES:]
        continues = bool(continued) and continued != tip
        before = self._drop(continued)
        if continues and before is not None and before.continues:
            self.continued_share.add(1.0)
        continues = continues or (before is not None and before.continues)
        self._drop(tip)
        self._turns[tip] = _Turn(worker_id, now_ns, is_long, continues)
        self._count[worker_id] += is_long
        self._all[worker_id] += 1
        while self._turns:
            oldest, turn = next(iter(self._turns.items()))
            if len(self._turns) <= _MAX_SESSIONS and now_ns - turn.at_ns < _KEPT_NS:
                break
            self._drop(oldest)
            if turn.continues:
                self.continued_share.add(0.0)

    def _drop(self, tip: bytes) -> _Turn | None:
        turn = self._turns.pop(tip, None)
        if turn is not None:
            self._count[turn.worker_id] -= turn.is_long
            self._all[turn.worker_id] -= 1
            if not self._all[turn.worker_id]:
                del self._all[turn.worker_id], self._count[turn.worker_id]
        return turn

    def with_fewest(self, workers: Sequence[str]) -> list[int]:
        """Return the places of the workers with the fewest sessions, long or not."""
        counts = [self._all[worker_id] for worker_id in workers]
        least = min(counts)
        return [place for place, count in enumerate(counts) if count == least]

    def expected_delays(self, workers: Sequence[str], tip: bytes = b"") -> list[float]:
        """Return by how many turns a session at each of some workers will be delayed.

        One with a ``tip`` has the common prefix, and is delayed by those that its worker has not. A
        copy for a new session serves as many as would be delayed, so each of them has a part of its
        cost: the delay counts once for each.
        """
        turn = self._turns.get(tip)
        least = min(self._count[worker_id] for worker_id in workers)
        own = self._count[turn.worker_id] if turn is not None and turn.is_long else least
        more = [min(max(self._count[worker_id] - own, 0), _MOST_MORE) for worker_id in workers]
        return [_DELAY_SHARE * sessions * (1 if turn else sessions) for sessions in more]
