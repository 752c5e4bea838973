"""A worker that rested and gets work beside the stream, in virtual time."""

import asyncio

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from router.routing.workers.silence import REST_BEAT_S
from tests.router.workers.virtual_time import VirtualLoop, fleet
from tests.soak import examples

LONG_S = 90.0


class LinkMachine(RuleBasedStateMachine):
    """Whatever reaches a worker by whichever way, its lease is renewed while it is wanted.

    The stream's model test (``tests/router/requests/test_stream_model.py``) knows what is sent and
    lost. This one knows when: rests, heartbeats, leases, silences, and calls beside the stream.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = pytest.MonkeyPatch()
        self.loop = VirtualLoop()
        self.fleet = self.run(fleet(self.patches))

    def run(self, work):
        return self.loop.run_until_complete(work)

    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule(
        alone=st.booleans(),
        before_s=st.sampled_from((0.0, 0.2, 3.0)),
        behind_s=st.sampled_from((0.0, 0.2, 3.0)),
    )
    def submit(self, alone, before_s, behind_s):
        async def submit():
            self.fleet.submit(alone=alone, before_s=before_s, behind_s=behind_s)
            await asyncio.sleep(0)

        self.run(submit())

    @rule(seconds=st.sampled_from((0.05, 0.3, 1.1, 2.6, 6.0, 20.0, LONG_S)))
    def time_passes(self, seconds):
        self.wait(seconds)

    @precondition(lambda self: self.fleet.service.running())
    @rule(number=st.integers(0, 7))
    def a_request_ends(self, number):
        running = self.fleet.service.running()
        running[number % len(running)].finish()

    @precondition(lambda self: self.fleet.link.live)
    @rule()
    def the_stream_breaks(self):
        self.fleet.stream.cut()

    @invariant()
    def no_lease_lapses(self):
        assert not self.fleet.service.lapsed

    @invariant()
    def no_worker_is_dead(self):
        assert not self.fleet.deaths

    def teardown(self):
        self.wait(LONG_S)
        assert not self.fleet.service.lapsed
        assert not self.fleet.deaths
        assert self.fleet.link.live
        for held in self.fleet.service.running():
            held.finish()
        self.wait(20.0)
        assert not self.fleet.active, "each request has its end"
        before = self.fleet.heartbeats()
        self.wait(4 * REST_BEAT_S)
        assert self.fleet.heartbeats() - before <= 6, "a worker at rest is left alone"
        self.run(self.fleet.close())
        self.loop.close()
        self.patches.undo()


def test_no_lease_lapses_and_no_worker_is_given_up_however_work_reaches_it():
    run_state_machine_as_test(
        LinkMachine,
        settings=settings(
            max_examples=examples(60),
            stateful_step_count=15,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("alone", [False, True])
def test_a_worker_that_rested_for_a_minute_holds_a_long_request_for_ten(monkeypatch, alone):
    """A submission above 64 KiB is a call of its own: its lease lapsed after 5 s."""
    loop = VirtualLoop()

    async def life():
        made = await fleet(monkeypatch)
        await asyncio.sleep(60)
        made.submit(alone=alone)
        await asyncio.sleep(600)
        lapsed = made.service.lapsed
        running = made.service.running()
        await made.close()
        return lapsed, len(running)

    assert loop.run_until_complete(life()) == ([], 1)
    loop.close()


@pytest.mark.parametrize(
    ("wire_max", "frames"), [(2, [1] * 100), (3, [64, 36])], ids=["old worker", "new worker"]
)
def test_requests_that_wait_for_a_write_travel_together(monkeypatch, wire_max, frames):
    """gRPC takes one write at a time: with a frame for each, a thousand clients waited seconds."""
    loop = VirtualLoop()

    async def life():
        made = await fleet(monkeypatch)
        made.link.capabilities.wire.max = wire_max
        names = [made.submit(alone=False) for _ in range(100)]
        await asyncio.sleep(1)
        held = sorted(request.submission.request_id for request in made.service.running())
        sent = made.submissions()
        await made.close()
        return names, held, sent

    names, held, sent = loop.run_until_complete(life())
    assert held == sorted(names)
    assert [len(group) for group in sent] == frames
    assert [name for group in sent for name in group] == names, "in order"
    loop.close()
