"""Outcome of requests with latency limits: kept or missed."""

from collections.abc import Iterable

from baton.types.errors import SloUnreachableError
from baton.types.geometry import context_tokens
from baton.types.slo import Slo
from router.routing.placement.placer import Placement
from router.routing.requests.active_request import ActiveRequest


def outcome(active: ActiveRequest, slo: Slo, now_ns: int) -> str:
    """Return ``good``, ``late``, ``refused`` or ``failed`` for a request that has ended.

    ``now_ns`` is when a response without tokens, such as an embedding, was delivered.
    """
    record = active.record
    if isinstance(record.error, SloUnreachableError):
        return "refused"
    if record.error is not None or active.placement is None:
        return "failed"
    arrived_ns = active.request.arrived_ns
    times_ns = (record.first_token_ns or now_ns, record.second_token_ns, record.last_token_ns)
    first_s, second_s, last_s = ((at_ns - arrived_ns) / 1e9 for at_ns in times_ns)
    tokens = record.completion_tokens // active.request.sampling.n
    own_s = _own_s(active, active.placement)
    return "good" if slo.met_by(own_s, first_s, second_s, last_s, tokens) else "late"


def slo_header(requests: Iterable[ActiveRequest], now_ns: int) -> str:
    """Return the value of ``x-baton-slo``: ``met``, ``late``, or "" without limits.

    A response of which only the beginning is known is judged by that.
    """
    value = ""
    for active in requests:
        slo = active.request.slo
        placement = active.placement
        if slo is None or placement is None:
            continue
        if active.record.ended:
            kept = outcome(active, slo, now_ns) == "good"
        else:
            kept = _began_in_time(active, placement, slo, now_ns)
        if not kept:
            return "late"
        value = "met"
    return value


def _began_in_time(active: ActiveRequest, placement: Placement, slo: Slo, now_ns: int) -> bool:
    first_ns = active.record.first_token_ns or now_ns
    limit_s = slo.ttft_s + 2 * _own_s(active, placement)
    return (first_ns - active.request.arrived_ns) / 1e9 <= limit_s


def _own_s(active: ActiveRequest, placement: Placement) -> float:
    length = active.record.prompt_tokens  # the request of a sent response has no prompt
    return placement.chosen.computes.prompt_s(length, context_tokens(0, length))
