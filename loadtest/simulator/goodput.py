"""Goodput of a simulated fleet: requests that kept their limits, of all that were sent."""

from statistics import fmean

import msgspec

from baton.types.slo import Slo
from loadtest.simulator.records import Record
from loadtest.simulator.setup import Setup

LONG_TOKENS = 32_768


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Shares are between 0 and 1.

    Attributes:
        good_per_s: Good requests per second, from the first client to the last; without those that
            came again after that.
        good_share: Good requests of all that were sent.
        refused_share: Requests that got 429.
        good_of_admitted_share: Good requests of those that were answered.
        long_admitted_ratio: Share of prompts over 32,768 tokens that were answered, divided by the
            share of all requests that were; None if there are no such prompts.
        wasted_share: Prompt tokens computed for requests that were not good, of all computed ones.
        turns: Changes of a worker's role.
        worker_hours: Hours for which workers were there until the last arrival, starts included.
        good_per_worker_hour: Good requests per hour of a worker.
        second_tries: Clients that came again after 429 before the last client came.
        second_try_share: Share of these that were let in at their second try; None without any.
        retry_after_s: Mean ``Retry-After`` of their first refusal.
        mean_tries: Tries of a client.
    """

    good_per_s: float
    good_share: float
    refused_share: float
    good_of_admitted_share: float
    long_admitted_ratio: float | None
    wasted_share: float
    turns: int
    worker_hours: float = 0.0
    good_per_worker_hour: float = 0.0
    second_tries: int = 0
    second_try_share: float | None = None
    retry_after_s: float = 0.0
    mean_tries: float = 1.0


def goodput(
    records: list[Record], setup: Setup, slo: Slo, turns: int = 0, worker_s: float = 0.0
) -> Goodput:
    """Return the goodput of a finished simulation."""
    good = {record.id for record in records if is_good(record, setup, slo)}
    admitted = [record for record in records if not record.error]
    long = [record for record in records if record.prompt_tokens > LONG_TOKENS]
    admitted_share = len(admitted) / len(records)
    long_share = sum(not record.error for record in long) / max(len(long), 1)
    computed = {
        record.id: record.prompt_tokens - record.cached_tokens
        for record in records
        if record.started_ns
    }
    wasted = sum(tokens for name, tokens in computed.items() if name not in good)
    sent_ns = [record.sent_ns for record in records]
    last_ns = max(sent_ns)
    span_s = max(last_ns - min(sent_ns), 1) / 1e9
    in_span = sum(record.id in good and record.request.arrived_ns <= last_ns for record in records)
    again = [record for record in records if 0 < record.again_ns <= last_ns]
    let_in = sum(record.tries == 2 and not record.error for record in again)
    return Goodput(
        good_per_s=round(in_span / span_s, 4),
        good_share=round(len(good) / len(records), 4),
        refused_share=round(1 - admitted_share, 4),
        good_of_admitted_share=round(len(good) / max(len(admitted), 1), 4),
        long_admitted_ratio=round(long_share / admitted_share, 4) if long and admitted else None,
        wasted_share=round(wasted / max(sum(computed.values()), 1), 4),
        turns=turns,
        worker_hours=round(worker_s / 3600, 4),
        good_per_worker_hour=round(len(good) / worker_s * 3600, 2) if worker_s else 0.0,
        second_tries=len(again),
        second_try_share=round(let_in / len(again), 4) if again else None,
        retry_after_s=round(fmean(record.retry_after_s for record in again), 2) if again else 0.0,
        mean_tries=round(fmean(record.tries for record in records), 4),
    )


def is_good(record: Record, setup: Setup, slo: Slo) -> bool:
    """Return whether a response kept its limits; the prompt's own time is for all its tokens."""
    if record.error:
        return False
    own_s = setup.timing.step_s + setup.timing.prompt_s(record.prompt_tokens)
    times_ns = (record.first_ns, record.second_ns, record.last_ns)
    first_s, second_s, last_s = ((at_ns - record.request.arrived_ns) / 1e9 for at_ns in times_ns)
    return slo.met_by(own_s, first_s, second_s, last_s, record.tokens)
