"""Load of a server that does not come from its worker, from what the server reports. Sans-IO.

Other clients, routers of other fleets and gateways may use the same server. It reports how many
sequences it runs; those that the worker has not sent are of others. Both numbers change all the
time, so of the last two reports the smaller difference counts.
"""

from dataclasses import dataclass
from typing import NamedTuple

_IDLE_REPORTS = 10  # a server that computes nothing may still report a request that was aborted
_STALLED_REPORTS = 8  # one a second; no step of decode takes as long
_MISSING_REPORTS = 10


class ServerLoad(NamedTuple):
    """Load that a server reports.

    Attributes:
        running: Sequences that it runs; ``waiting`` those in its queue.
        prompt_tokens: Mean tokens of past prompts; ``computed_tokens`` those that were not cached.
        work: A number that changes whenever the server has computed something.
        is_whole: Whether it counts all sequences that the server has, as of one step.
    """

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    work: float = 0.0
    is_whole: bool = True


@dataclass(slots=True)
class OtherLoad:
    """Load of others.

    Attributes:
        running: Their sequences that run; ``waiting`` those that wait.
        prompt_tokens: Expected tokens of each prompt; ``computed_tokens`` those to compute.
    """

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    _excess: int = 0  # of the last report
    _work: float = -1.0
    _idle_reports: int = 0

    def observe(self, load: ServerLoad, own: int) -> bool:
        """Note a report; return whether the load of others has changed.

        ``own`` is the largest number of the worker's sequences since the report was asked for.
        """
        before = self.running, self.waiting
        self._idle_reports = 0 if load.work != self._work else self._idle_reports + 1
        self._work = load.work
        reported = load.running + load.waiting
        excess = max(reported - own, 0) if self._idle_reports < _IDLE_REPORTS else 0
        others = min(excess, self._excess)
        self._excess = excess
        self.waiting = round(others * load.waiting / reported) if others else 0
        self.running = others - self.waiting
        self.prompt_tokens = load.prompt_tokens
        self.computed_tokens = load.computed_tokens
        return (self.running, self.waiting) != before


@dataclass(slots=True)
class StallWatch:
    """Notices that a server neither computes nor sends tokens, although it looks healthy.

    A prompt may take minutes in one step, so only a server that has none to compute is judged.
    """

    _seen: tuple[float, int | None] = (-1.0, None)
    _equal_reports: int = 0

    def observe(self, load: ServerLoad, own: int, generated: int | None) -> bool:
        """Note a report; return whether the server is stalled.

        ``generated`` are tokens of the ``own`` sequences so far; None if a prompt is not computed.
        """
        seen = load.work, generated
        may_stall = generated is not None and load.running + load.waiting <= own
        self._equal_reports = self._equal_reports + 1 if may_stall and seen == self._seen else 0
        self._seen = seen
        return self._equal_reports >= _STALLED_REPORTS


@dataclass(slots=True)
class MissingWatch:
    """Notices sequences that a server does not have, such as those that a proxy holds back.

    A report is as of the server's last step, so only reports after further steps count. While
    sequences wait in the server's queue, nothing tells them from missing ones.
    """

    _work: float = -1.0
    _reports: int = 0
    _missing: int = 0

    def observe(self, load: ServerLoad, own: int) -> int:
        """Note a report; return how many of the ``own`` sequences the server has long been without.

        ``own`` is the smallest number since the report was asked for. Load of others hides missing
        sequences.
        """
        missing = own - load.running - load.waiting
        if missing <= 0 or load.waiting or not load.is_whole:
            self._reports = 0
        elif load.work != self._work:
            self._missing = min(missing, self._missing) if self._reports else missing
            self._reports += 1
        self._work = load.work
        if self._reports < _MISSING_REPORTS:
            return 0
        self._reports = 0
        return self._missing
