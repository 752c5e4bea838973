"""What a worker's silence means, and when it is sent a heartbeat. Sans-IO.

A worker with work sends something every second, and one that sends nothing for two is dead. One at
rest (``WorkerStatus.resting``) sends nothing before it is sent something: its silence counts from
the first frame that it has not answered. It has answered a frame once a frame of its own reports
that it has read so many (``WorkerFrame.heard``). So a worker that may be dead is sent a heartbeat.

Only a worker at rest is sent heartbeats that are rarer than its leases, because it holds nothing by
a lease. Work can reach it beside the stream, by a call of its own. Such a call ends the rest when
it begins. The rest returns when the worker has answered a frame that was sent after the call: only
a report from after that frame knows of the work.

    rest ──frame sent, call begun, report of work──▶ work
    work ──report of rest, nothing unanswered, no call under way──▶ rest

All times are of ``baton.telemetry.alive_clock``, which leaves out this process's standstills.
"""

import random

HEARTBEATS_IDLE = 4  # a worker that is idle, and not at rest, is sent one heartbeat in so many
REST_BEAT_S = 50.0  # to one at rest; it drops a router that it does not hear for a minute
UNSEEN_BEAT_S = 5.0  # and if Redis does not show that it lives
STALE_S = 2.5  # it shows that once a second
_SPREAD = 0.75  # of these times at least: a thousand workers must not be asked at once


class Exchange:
    """What was sent to one worker, what came, and what is unanswered.

    Args:
        opened_ns: When the stream was opened.
    """

    def __init__(self, opened_ns: int) -> None:
        self._calls = 0  # under way beside the stream
        self._worked_ns = opened_ns  # the last thing was sent that is no heartbeat
        self.opened(opened_ns)

    def opened(self, now_ns: int) -> None:
        """Begin with a new stream; calls beside it outlive the old one."""
        self._last_ns = now_ns  # a frame came, or the first was sent that waits for one
        self._written = 0  # frames sent
        self._asked = 0  # of these, the last that must be answered before the worker rests
        self._heard = 0  # frames that the worker has read
        self.resting = False  # by its last report

    def wrote(self, now_ns: int, *, beat: bool = False) -> None:
        """Note a frame that was sent."""
        if self.owes_nothing:
            self._last_ns = now_ns
        self._written += 1
        if not beat:
            self._asked = max(self._asked, self._written)
            self._worked_ns = now_ns

    def call_began(self, now_ns: int) -> None:
        """Note that work is being sent by a call beside the stream."""
        if self.owes_nothing:
            self._last_ns = now_ns
        self._calls += 1
        self._worked_ns = now_ns

    def call_ended(self, now_ns: int) -> None:
        """Note that such a call has ended: the frame after it must be answered."""
        self._calls -= 1
        self._asked = self._written + 1
        self._worked_ns = now_ns

    def took(self, heard: int, now_ns: int, *, resting: bool | None = None) -> None:
        """Note a frame that came.

        Args:
            heard: How many frames the worker has read.
            now_ns: The clock.
            resting: Whether the worker rests, if the frame reports it.
        """
        self._heard = max(self._heard, heard)
        self._last_ns = now_ns
        if resting is not None:
            self.resting = resting

    @property
    def owes_nothing(self) -> bool:
        """Whether the worker rests, and has answered all that it was sent."""
        return self.at_rest and self._heard >= self._written

    @property
    def at_rest(self) -> bool:
        """Whether the worker has nothing to do, and reports so since it was sent any work."""
        return self.resting and not self._calls and self._heard >= self._asked

    @property
    def silent_since_ns(self) -> int | None:
        """Since when the worker sends nothing though it should; None: it need not."""
        return None if self.owes_nothing else self._last_ns

    def beat_ns(self, now_ns: int, heartbeat_ns: int, rest_beat_ns: int, *, idle: bool) -> int:
        """The time between two frames to the worker at present.

        Args:
            now_ns: The clock.
            heartbeat_ns: To a worker with work, whose leases must be renewed.
            rest_beat_ns: To one at rest.
            idle: Whether the worker's last report shows no work.
        """
        if self.at_rest:
            return rest_beat_ns
        rare_ns = HEARTBEATS_IDLE * heartbeat_ns
        if idle and not self._calls and now_ns - self._worked_ns > rare_ns:
            return rare_ns
        return heartbeat_ns


class Rest:
    """When a worker at rest is asked whether it lives.

    Redis shows once a second that a worker refreshed its keys. One that Redis has shown, and no
    longer shows while it answers, is asked at once; one that Redis does not show, every 5 s.
    """

    def __init__(self) -> None:
        self._seen_ns = 0  # in Redis
        self._doubted = True  # asked since
        self._part = random.uniform(_SPREAD, 1.0)
        self.beat_s = REST_BEAT_S * self._part

    def seen(self, now_ns: int) -> None:
        """Redis shows that it lives."""
        self._seen_ns = now_ns
        self._doubted = False

    def asks(self, now_ns: int, heard_ns: int, redis_since_ns: int | None) -> bool:
        """Whether it must be asked now.

        Args:
            now_ns: The clock.
            heard_ns: When its last frame came.
            redis_since_ns: Since when Redis answers; None: it does not.
        """
        quiet_s = (now_ns - max(heard_ns, self._seen_ns)) / 1e9
        if quiet_s >= UNSEEN_BEAT_S * self._part:
            return True
        if self._doubted or redis_since_ns is None or quiet_s < STALE_S:
            return False
        self._doubted = (now_ns - redis_since_ns) / 1e9 >= STALE_S
        return self._doubted
