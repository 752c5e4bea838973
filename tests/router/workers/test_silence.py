"""What a worker's silence means, in made-up time."""

from router.routing.workers.silence import (
    REST_BEAT_S,
    STALE_S,
    UNSEEN_BEAT_S,
    Rest,
    UnansweredFrames,
)

S = 1_000_000_000


def rested(at_ns: int = 0) -> UnansweredFrames:
    """A stream on which the worker has answered the hello, and rests."""
    exchange = UnansweredFrames(at_ns)
    exchange.wrote(at_ns)
    exchange.took(1, at_ns, resting=True)
    return exchange


def test_a_worker_of_before_owes_a_frame_every_second_whatever_was_sent() -> None:
    exchange = UnansweredFrames(5)
    assert exchange.silent_since_ns == 5
    exchange.wrote(6)
    exchange.took(0, 7, resting=False)
    for now_ns in range(8, 12):
        exchange.wrote(now_ns)
    assert (exchange.silent_since_ns, exchange.at_rest) == (7, False)


def test_a_worker_at_rest_owes_nothing_until_it_is_sent_something() -> None:
    exchange = rested()
    assert exchange.silent_since_ns is None
    exchange.wrote(30 * S)
    exchange.wrote(31 * S)
    assert exchange.silent_since_ns == 30 * S, "the first that waits for an answer"
    assert not exchange.at_rest
    exchange.took(3, 32 * S)
    assert exchange.silent_since_ns is None
    assert exchange.at_rest


def test_a_frame_that_was_under_way_answers_nothing_that_was_sent_meanwhile() -> None:
    """Else a submission that came to a worker as it hung would wait for ever."""
    exchange = rested()
    exchange.wrote(10 * S)
    exchange.took(1, 10 * S + 1, resting=True)
    assert exchange.silent_since_ns == 10 * S + 1
    assert not exchange.at_rest


def test_a_heartbeat_does_not_make_a_rest_a_time_of_work() -> None:
    exchange = rested()
    exchange.wrote(10 * S, beat=True)
    assert exchange.at_rest, "no more heartbeats than before"
    assert not exchange.owes_nothing, "but it must be answered"


def test_news_of_work_end_the_rest() -> None:
    exchange = rested()
    exchange.took(1, 9 * S, resting=False)
    assert exchange.silent_since_ns == 9 * S


def test_one_that_redis_no_longer_shows_is_asked_once_and_then_as_one_it_never_showed() -> None:
    rest, stale_ns = Rest(), int(STALE_S * S) + 1
    rest.seen(100 * S)
    assert not rest.asks(102 * S, 0, redis_since_ns=0)
    assert not rest.asks(100 * S + stale_ns, 0, redis_since_ns=None), "Redis is away: no wonder"
    assert not rest.asks(100 * S + stale_ns, 0, redis_since_ns=101 * S), "it has just come back"
    assert rest.asks(100 * S + stale_ns, 0, redis_since_ns=0)
    answered_ns = 103 * S
    assert not rest.asks(answered_ns + stale_ns, answered_ns, redis_since_ns=0)
    assert rest.asks(answered_ns + int(UNSEEN_BEAT_S * S), answered_ns, redis_since_ns=0)
    rest.seen(110 * S)
    assert not rest.asks(112 * S, 0, redis_since_ns=0)
    assert rest.asks(110 * S + stale_ns, 0, redis_since_ns=0), "seen again, and lost again"


def test_a_thousand_are_not_asked_at_once() -> None:
    beats_s = sorted(Rest().beat_s for _ in range(1000))
    assert 0.7 * REST_BEAT_S < beats_s[0] < 0.8 * REST_BEAT_S
    assert 0.95 * REST_BEAT_S < beats_s[-1] <= REST_BEAT_S


def test_a_worker_without_work_is_sent_few_heartbeats() -> None:
    """Two a second to each of a thousand idle workers took a router a fifth of a core."""
    heartbeat_ns = S // 2
    exchange = UnansweredFrames(0)

    def beat_s(at_s: float, *, idle: bool) -> float:
        return exchange.beat_ns(int(at_s * S), heartbeat_ns, 50 * S, idle=idle) / S

    assert beat_s(100, idle=False) == 0.5, "it reports work, or nothing is known of it"
    assert beat_s(100, idle=True) == 2.0
    exchange.wrote(99 * S)
    assert beat_s(100, idle=True) == 0.5, "it may hold what it was just sent"
    assert beat_s(102, idle=True) == 2.0
    exchange.call_began(110 * S)
    assert beat_s(119, idle=True) == 0.5, "a call beside the stream is under way"
    exchange.call_ended(120 * S)
    assert beat_s(121, idle=True) == 0.5
    assert beat_s(123, idle=True) == 2.0
    exchange.took(1, 123 * S, resting=True)
    assert beat_s(124, idle=True) == 2.0, "the report is of before the call"
    exchange.wrote(124 * S, beat=True)
    exchange.took(2, 125 * S, resting=True)
    assert beat_s(125, idle=True) == 50.0
