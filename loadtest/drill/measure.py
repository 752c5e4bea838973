"""Sends phases of load to a fleet, and finds the rate that it holds."""

import secrets
import statistics
from collections.abc import Awaitable, Callable, Sequence

from loadtest.client.processes import run_clients
from loadtest.client.records import CallRecord, ServerOptions
from loadtest.client.server import ServerError
from loadtest.drill.phases import (
    GoodLimits,
    LoadPhase,
    PhaseFigures,
    figures_of,
    phased_plan,
    phases_of,
)
from loadtest.metrics import request_figures

HELD_SHARE = 0.95
"""Share of good responses at a rate that a fleet holds."""

TRIED = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Shares of the goodput under overload that `held_rate` tries, until the fleet holds one."""

_ALONE = 4


async def send_phases(phases: Sequence[LoadPhase], server: ServerOptions) -> list[CallRecord]:
    """Send the load of some phases; return the records when all requests have ended."""
    records: list[CallRecord] = []
    plan = phased_plan(phases, secrets.randbits(32))
    await run_clients(plan, server, clients=1, record=records.append)
    return records


async def alone_s(server: ServerOptions) -> float:
    """Return the median TTFT of prompts that are sent one after another.

    Raises:
        ServerError: A request failed.
    """
    times_s: list[float] = []
    for _ in range(_ALONE):
        phase = LoadPhase(name="alone", rate=1.0, begin_s=0.0, end_s=1.0)
        (record,) = await send_phases([phase], server)
        ttft_s = request_figures.ttft_from_send_s(record)
        if record.end != "ok" or ttft_s is None:
            raise ServerError(f"a request to the idle fleet failed: {record.end} {record.detail}")
        times_s.append(ttft_s)
    return statistics.median(times_s[1:])  # the first may start something


async def goodput(
    rate: float, seconds: float, server: ServerOptions, limits: GoodLimits
) -> PhaseFigures:
    """Return the figures of some seconds at one rate."""
    (phase,) = phases_of([(f"{rate:.2f}/s", rate, seconds)])
    return figures_of(phase, await send_phases([phase], server), limits)


Measure = Callable[[float], Awaitable[PhaseFigures]]
"""Function that measures a rate in requests per second."""


async def held_rate(measure: Measure, overload: PhaseFigures) -> PhaseFigures | None:
    """Return the figures of the highest tried rate whose responses are nearly all good.

    Tries the goodput that the fleet had under ``overload``, then less; None if it holds no rate.
    """
    if overload.good_share >= HELD_SHARE:
        return overload
    for share in TRIED:
        if not overload.good_per_s:
            break
        held = await measure(share * overload.good_per_s)
        if held.good_share >= HELD_SHARE:
            return held
    return None
