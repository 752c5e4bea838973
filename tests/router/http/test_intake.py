import asyncio
import time

from baton.telemetry.metrics import Metrics
from router.frontend.http.intake import Intake, arrived_ns_of

CALLS = 2000


class App:
    """Notes which calls begin in which turn of the loop."""

    def __init__(self) -> None:
        self.turn = 0
        self.begun: list[tuple[str, int]] = []
        self.arrived_ns: list[int] = []

    async def __call__(self, scope, receive, send) -> None:
        self.begun.append((scope["path"], self.turn))
        self.arrived_ns.append(arrived_ns_of(scope))

    async def count_turns(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.turn += 1


def call(app, path: str, method: str = "POST"):
    return app({"type": "http", "method": method, "path": path}, None, None)


async def test_calls_begin_in_order_and_few_in_each_turn():
    app = App()
    intake = Intake(app, Metrics("router"))
    counting = asyncio.create_task(app.count_turns())
    before_ns = time.monotonic_ns()
    calls = [asyncio.create_task(call(intake, str(number))) for number in range(CALLS)]
    await asyncio.sleep(0)
    after_ns = time.monotonic_ns()
    await asyncio.gather(*calls)
    counting.cancel()
    assert [path for path, _ in app.begun] == [str(number) for number in range(CALLS)]
    in_turn = [turn for _, turn in app.begun]
    assert max(in_turn.count(turn) for turn in in_turn) <= 512  # two batches can share a count
    assert len(set(in_turn)) >= 4
    assert all(before_ns <= arrived_ns <= after_ns for arrived_ns in app.arrived_ns)


async def test_other_calls_do_not_wait_and_a_call_alone_does_not_either():
    app = App()
    intake = Intake(app, Metrics("router"))
    calls = [asyncio.create_task(call(intake, "post")) for _ in range(CALLS)]
    health = asyncio.create_task(call(intake, "health", "GET"))
    await asyncio.sleep(0)
    assert ("health", 0) in app.begun
    assert len(app.begun) < CALLS
    await asyncio.gather(health, *calls)
    await asyncio.sleep(0.01)
    await call(intake, "alone")
    assert app.begun[-1][0] == "alone"


async def test_a_call_that_was_given_up_while_it_waited_takes_no_turn():
    app = App()
    intake = Intake(app, Metrics("router"))
    calls = [asyncio.create_task(call(intake, str(number))) for number in range(CALLS)]
    await asyncio.sleep(0)
    for waiting in calls[600:700]:
        waiting.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert len(app.begun) == CALLS - 100
