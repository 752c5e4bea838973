"""What a worker's silence means. Sans-IO.

A worker with work says something every second, and one that says nothing for two is dead. One at
rest (``WorkerStatus.resting``) says nothing before it is sent something: its silence counts from
the first frame that it has not answered, which it has once a frame of its own says that it has read
so many (``WorkerFrame.heard``). So whoever doubts that it lives sends it a heartbeat.
"""

import random

HEARTBEATS_IDLE = 4  # a worker that is idle, and not at rest, is sent one heartbeat in so many
REST_BEAT_S = 50.0  # to one at rest; it drops a router that it does not hear for a minute
UNSEEN_BEAT_S = 5.0  # and if Redis does not show that it lives
STALE_S = 2.5  # it shows that once a second
_SPREAD = 0.75  # of these times at least: a thousand workers must not be asked at once


class Exchange:
    """One stream to a worker: what was sent, what came, and what is owed.

    Args:
        opened_ns: When the stream was opened, on the monotonic clock.
    """

    def __init__(self, opened_ns: int) -> None:
        self._last_ns = opened_ns  # a frame came, or the first was sent that waits for one
        self._written = self._asked = self._heard = 0  # frames: sent, sent for more than a beat
        self.resting = False  # by its last report

    def wrote(self, now_ns: int, *, beat: bool = False) -> None:
        """A frame was sent."""
        if self.owes_nothing:
            self._last_ns = now_ns
        self._written += 1
        if not beat:
            self._asked = self._written

    def took(self, heard: int, now_ns: int, *, resting: bool | None = None) -> None:
        """A frame came that says how many the worker has read, and perhaps whether it rests."""
        self._heard, self._last_ns = max(self._heard, heard), now_ns
        if resting is not None:
            self.resting = resting

    @property
    def owes_nothing(self) -> bool:
        """Whether the worker rests, and has answered all that it was sent."""
        return self.resting and self._heard >= self._written

    @property
    def at_rest(self) -> bool:
        """Whether the worker has nothing to do, and has said so since it was sent anything."""
        return self.resting and self._heard >= self._asked

    @property
    def silent_since_ns(self) -> int | None:
        """Since when the worker says nothing though it should; None: it need not."""
        return None if self.owes_nothing else self._last_ns


class Silence:
    """How long a worker has owed a frame.

    While this process's event loop stood still, frames may have lain unread: that time does not
    count.

    Args:
        since_ns: When the stream was opened, on the monotonic clock.
    """

    def __init__(self, since_ns: int) -> None:
        self._since_ns = since_ns
        self.late_ns = 0  # how much of the silence does not count

    def grown_ns(self, now_ns: int, since_ns: int, late_ns: int) -> int:
        """The silence so far.

        Args:
            now_ns: The clock.
            since_ns: When it began, as far as is known now.
            late_ns: By how much the caller was woken too late.
        """
        if since_ns > self._since_ns:
            self._since_ns, self.late_ns = since_ns, 0
        self.late_ns += max(late_ns, 0)
        return now_ns - self._since_ns - self.late_ns


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
        self._seen_ns, self._doubted = now_ns, False

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
