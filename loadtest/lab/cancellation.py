"""Clients that hang up in the middle of an answer: until the workers have nothing left of it."""

import time
from concurrent.futures import ThreadPoolExecutor

from loadtest.client.server import ServerError
from loadtest.lab.asking import Fleet
from loadtest.lab.results import Cell, Findings, Plot, Series
from loadtest.lab.table import LabContext

READ_CHUNKS = 8
ANSWER_TOKENS = 1024
AT_ONCE = (1, 2, 4, 8, 16)
QUICK_AT_ONCE = (1, 4)
_LIMIT_S = 30.0
_POLL_S = 0.02


def run(context: LabContext) -> Findings:
    """More and more clients at once read a few words of a long answer and close their stream."""
    with Fleet(context) as fleet:
        fleet.stream("hello", 2)
        rows = [
            _measure(fleet, context, count)
            for count in (QUICK_AT_ONCE if context.quick else AT_ONCE)
        ]
    counts = [float(str(row[0])) for row in rows]
    worst = max(float(str(row[1])) for row in rows)
    return Findings(
        parameters={
            "answer asked for, tokens": ANSWER_TOKENS,
            "read before hanging up, chunks": READ_CHUNKS,
        },
        columns=[
            "clients",
            "confirmed ms, mean",
            "at rest after ms",
            "blocks left",
            "running left",
        ],
        rows=rows,
        plots=[
            Plot(
                title="From hanging up to the worker's confirmed end, and until /fleet is at rest",
                x_label="clients that hang up at once",
                y_label="ms",
                x=counts,
                series=[
                    Series("confirmed, mean", [float(str(row[1])) for row in rows]),
                    Series("all at rest", [float(str(row[2])) for row in rows]),
                ],
            )
        ],
        sentence=f"Up to {rows[-1][0]} clients hung up at once; their requests were over "
        f"within {worst:.0f} ms on average, and no block and no request was left.",
        notes=[
            "Confirmed: baton_release_seconds of the router, from its notice of the hang-up.",
            "At rest: seen by the client in /fleet, which is up to half a second old.",
            "The fleet must be at rest when the lab begins, and nobody else may use it.",
        ],
    )


def _measure(fleet: Fleet, context: LabContext, count: int) -> list[Cell]:
    _until_at_rest(fleet)
    sum_s, ended = fleet.total("baton_release_seconds")

    def hang_up(number: int) -> float:
        with Fleet(context) as own:
            own.stream(f"Tell story number {number}.", ANSWER_TOKENS, stop_after=READ_CHUNKS)
        return time.monotonic()

    with ThreadPoolExecutor(count) as clients:
        last_s = max(clients.map(hang_up, range(count)))
    rest_s = _until_at_rest(fleet) - last_s
    more_s, now_ended = fleet.total("baton_release_seconds")
    if now_ended - ended != count:
        raise ServerError(
            f"{now_ended - ended:.0f} requests were cancelled instead of {count}: the answers were "
            "over before, or somebody else uses the fleet"
        )
    blocks, running = _left(fleet)
    return [count, 1e3 * (more_s - sum_s) / count, 1e3 * rest_s, blocks, running]


def _until_at_rest(fleet: Fleet) -> float:
    """When it was.

    Raises:
        ServerError: It never is.
    """
    until_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < until_s:
        if _left(fleet) == (0, 0):
            return time.monotonic()
        time.sleep(_POLL_S)
    raise ServerError(f"the fleet was not at rest within {_LIMIT_S:.0f} s: {_left(fleet)}")


def _left(fleet: Fleet) -> tuple[int, int]:
    """(blocks leased, requests running or waiting) on all workers."""
    workers = fleet.workers()
    blocks = sum(worker["kv_blocks"]["leased"] for worker in workers)
    return blocks, sum(worker["running"] + worker["waiting"] for worker in workers)
