"""Meaning of a worker's silence, and schedule of heartbeats to it. Sans-IO.

A worker with work sends something every second, and is dead after two seconds of silence. A worker
at rest (``WorkerStatus.resting``) sends nothing by itself: its silence counts from the first frame
that it has not answered. It has answered a frame once a frame of its own reports that it has read
so many (``WorkerFrame.heard``). So a worker that may be dead is sent a heartbeat.

Only a worker at rest is sent heartbeats that are rarer than its leases, because it holds no leases.
Work can reach it in a call beside the stream. Such a call ends the rest when it begins. The rest
returns when the worker has answered a frame that was sent after the call: only a report from after
that frame includes the work.

    rest ──frame sent, call begun, report of work──▶ work
    work ──report of rest, nothing unanswered, no call under way──▶ rest

All times are of ``baton.telemetry.alive_clock``, which excludes standstills of this process.
"""

import random

HEARTBEATS_IDLE = 4  # one heartbeat in so many is sent to a worker that is idle, not at rest
REST_BEAT_S = 50.0  # to a worker at rest; it drops a router that is silent for a minute
UNSEEN_BEAT_S = 5.0  # to a worker at rest that Redis does not show
STALE_S = 2.5  # Redis shows a live worker once a second
_SPREAD = 0.75  # smallest random factor of these times: a thousand workers must not coincide


class UnansweredFrames:
    """Frames that were sent to one worker, received from it, and are unanswered."""

    def __init__(self, opened_ns: int) -> None:
        self._calls = 0  # under way beside the stream
        self._worked_ns = opened_ns  # when something other than a heartbeat was last sent
        self.opened(opened_ns)

    def opened(self, now_ns: int) -> None:
        """Begin with a new stream; calls beside it outlive the old one."""
        self._last_ns = now_ns  # last frame received, or first one sent that needs an answer
        self._written = 0  # frames sent
        self._asked = 0  # number of the last one that must be answered before the worker rests
        self._heard = 0  # frames that the worker has read
        self.resting = False  # by its last report

    def wrote(self, now_ns: int, *, beat: bool = False) -> None:
        """Note a sent frame."""
        if self.owes_nothing:
            self._last_ns = now_ns
        self._written += 1
        if not beat:
            self._asked = max(self._asked, self._written)
            self._worked_ns = now_ns

    def call_began(self, now_ns: int) -> None:
        """Note the start of a call with work beside the stream."""
        if self.owes_nothing:
            self._last_ns = now_ns
        self._calls += 1
        self._worked_ns = now_ns

    def call_ended(self, now_ns: int) -> None:
        """Note the end of such a call: the next frame must be answered."""
        self._calls -= 1
        self._asked = self._written + 1
        self._worked_ns = now_ns

    def took(self, heard: int, now_ns: int, *, resting: bool | None = None) -> None:
        """Note a received frame: the worker has read ``heard`` frames, and may report rest."""
        self._heard = max(self._heard, heard)
        self._last_ns = now_ns
        if resting is not None:
            self.resting = resting

    @property
    def owes_nothing(self) -> bool:
        """True if the worker rests and has answered all frames."""
        return self.at_rest and self._heard >= self._written

    @property
    def at_rest(self) -> bool:
        """True if the worker has reported rest since it was last sent work."""
        return self.resting and not self._calls and self._heard >= self._asked

    @property
    def silent_since_ns(self) -> int | None:
        """Start of the silence of a worker that should send something, else None."""
        return None if self.owes_nothing else self._last_ns

    def beat_ns(self, now_ns: int, heartbeat_ns: int, rest_beat_ns: int, *, idle: bool) -> int:
        """Return the time between two frames to the worker.

        A worker with work has leases to renew. It is ``idle`` if its last report shows no work.
        """
        if self.at_rest:
            return rest_beat_ns
        rare_ns = HEARTBEATS_IDLE * heartbeat_ns
        if idle and not self._calls and now_ns - self._worked_ns > rare_ns:
            return rare_ns
        return heartbeat_ns


class Rest:
    """Schedule of heartbeats to a worker at rest.

    Redis shows once a second that a worker refreshed its keys. A worker that Redis has shown, and
    no longer shows while it answers, gets a heartbeat at once; one never shown, every 5 s.
    """

    def __init__(self) -> None:
        self._seen_ns = 0  # in Redis
        self._doubted = True  # a heartbeat was sent since
        self._part = random.uniform(_SPREAD, 1.0)
        self.beat_s = REST_BEAT_S * self._part

    def seen(self, now_ns: int) -> None:
        """Note that Redis shows the worker as alive."""
        self._seen_ns = now_ns
        self._doubted = False

    def asks(self, now_ns: int, heard_ns: int, redis_since_ns: int | None) -> bool:
        """Return whether a heartbeat is due, given the last frame and since when Redis answers."""
        quiet_s = (now_ns - max(heard_ns, self._seen_ns)) / 1e9
        if quiet_s >= UNSEEN_BEAT_S * self._part:
            return True
        if self._doubted or redis_since_ns is None or quiet_s < STALE_S:
            return False
        self._doubted = (now_ns - redis_since_ns) / 1e9 >= STALE_S
        return self._doubted
