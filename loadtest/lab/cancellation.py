"""Lab: time from a client's disconnect until the workers have freed everything."""

import time
from concurrent.futures import ThreadPoolExecutor

from loadtest.client.server import ServerError
from loadtest.commands.points import measured
from loadtest.lab.asking import Fleet
from loadtest.lab.results import Cell, Findings, Plot, Series
from loadtest.lab.table import LabContext

READ_CHUNKS = 8
ANSWER_TOKENS = 1024
CLIENTS = (1, 2, 4, 8, 16)
QUICK_CLIENTS = (1, 4)
_LIMIT_S = 30.0
_POLL_S = 0.02


def run(context: LabContext) -> Findings:
    """Let more and more clients at once disconnect in the middle of a long response."""
    with Fleet(context) as fleet:
        fleet.stream("hello", 2)
        clients = QUICK_CLIENTS if context.quick else CLIENTS
        rows = measured(clients, lambda count: _measure(fleet, context, count))
    counts = [float(str(row[0])) for row in rows]
    worst = max(float(str(row[1])) for row in rows)
    return Findings(
        left_out=rows.left_out,
        parameters={
            "requested output tokens": ANSWER_TOKENS,
            "chunks read before disconnecting": READ_CHUNKS,
        },
        columns=["clients", "confirmed ms, mean", "idle after ms", "blocks left", "running left"],
        rows=rows,
        plots=[
            Plot(
                title="Time from disconnect to the worker's confirmation, and to an idle fleet",
                x_label="clients that disconnect at once",
                y_label="ms",
                x=counts,
                series=[
                    Series("confirmed, mean", [float(str(row[1])) for row in rows]),
                    Series("fleet idle", [float(str(row[2])) for row in rows]),
                ],
            )
        ],
        sentence=f"Up to {rows[-1][0]} clients disconnected at once; their requests ended within "
        f"{worst:.0f} ms on average, and no block and no request was left.",
        notes=[
            "Confirmed: the router's baton_release_seconds, from its notice of the disconnect.",
            "Idle: seen by the client in /fleet, which is up to half a second old.",
            "The fleet must be idle when the lab starts, and without other clients.",
        ],
    )


def _measure(fleet: Fleet, context: LabContext, count: int) -> list[Cell]:
    _wait_idle(fleet)
    sum_s, ended = fleet.total("baton_release_seconds")

    def disconnect(number: int) -> float:
        with Fleet(context) as own:
            own.stream(f"Tell story number {number}.", ANSWER_TOKENS, stop_after=READ_CHUNKS)
        return time.monotonic()

    with ThreadPoolExecutor(count) as clients:
        last_s = max(clients.map(disconnect, range(count)))
    rest_s = _wait_idle(fleet) - last_s
    more_s, now_ended = fleet.total("baton_release_seconds")
    if now_ended - ended != count:
        raise ServerError(
            f"{now_ended - ended:.0f} requests were cancelled instead of {count}: the responses "
            "had already ended, or other clients use the fleet"
        )
    blocks, running = _left(fleet)
    return [count, 1e3 * (more_s - sum_s) / count, 1e3 * rest_s, blocks, running]


def _wait_idle(fleet: Fleet) -> float:
    until_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < until_s:
        if _left(fleet) == (0, 0):
            return time.monotonic()
        time.sleep(_POLL_S)
    raise ServerError(f"the fleet was not idle within {_LIMIT_S:.0f} s: {_left(fleet)}")


def _left(fleet: Fleet) -> tuple[int, int]:
    """Return (blocks leased, requests running or waiting) on all workers."""
    workers = fleet.workers()
    blocks = sum(worker["kv_blocks"]["leased"] for worker in workers)
    return blocks, sum(worker["running"] + worker["waiting"] for worker in workers)
