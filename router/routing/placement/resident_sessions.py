"""Recent sessions, by the worker that computes their prompts. Sans-IO.

    turn n     [ system prompt │ … ]            its last full block is the session's tip
    turn n+1   [ system prompt │ … tip │ … ]    continues it: the tip moves

Sessions that pause for a tool or a person show no load meanwhile, so the worker that has their
common prefix looks idle and free, and gets all new ones. Their number is the load that will come.
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
_TURN_WEIGHT = 0.05  # of one turn in the mean of their times


class _Turn(NamedTuple):
    worker_id: str
    at_ns: int


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
    """

    def __init__(self) -> None:
        self._turns: OrderedDict[bytes, _Turn] = OrderedDict()  # by tip
        self._count: Counter[str] = Counter()
        self.turn_s = RunningMean(_TURN_WEIGHT)

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

    def note(self, hashes: bytes, continued: bytes, worker_id: str, now_ns: int) -> None:
        """Note a turn that is computed on a worker; ``continued`` is the session's former tip.

        Without a ``worker_id`` the turn is recognised, but is no load of a worker.
        """
        if not hashes:
            return
        self._drop(continued)
        tip = hashes[-HASH_BYTES:]
        self._drop(tip)
        self._turns[tip] = _Turn(worker_id, now_ns)
        self._count[worker_id] += 1
        while self._turns:
            oldest, turn = next(iter(self._turns.items()))
            if len(self._turns) <= _MAX_SESSIONS and now_ns - turn.at_ns < _KEPT_NS:
                break
            self._drop(oldest)

    def _drop(self, tip: bytes) -> None:
        turn = self._turns.pop(tip, None)
        if turn is not None:
            self._count[turn.worker_id] -= 1
            if not self._count[turn.worker_id]:
                del self._count[turn.worker_id]

    def expected_delays(self, workers: Sequence[str], tip: bytes = b"") -> list[float]:
        """Return by how many turns a session at each of some workers will be delayed.

        One with a ``tip`` has the common prefix, and is delayed by those that its worker has not. A
        copy for a new session serves as many as would be delayed, so each of them has a part of its
        cost: the delay counts once for each.
        """
        turn = self._turns.get(tip)
        least = min(self._count[worker_id] for worker_id in workers)
        own = self._count[turn.worker_id] if turn is not None else least
        more = [min(max(self._count[worker_id] - own, 0), _MOST_MORE) for worker_id in workers]
        return [_DELAY_SHARE * sessions * (1 if turn else sessions) for sessions in more]
