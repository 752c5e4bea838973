"""Request reports for operators and tenants: what is known of a request, and why it was slow."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from statistics import median
from time import monotonic_ns
from typing import Any, Literal

from baton.types.geometry import BLOCK_TOKENS
from router.routing.placement.cost import WorkerLoad
from router.routing.reports.past_reports import KEPT, PastReport
from router.routing.reports.why import Facts, why
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.history import KeptRecords
from router.routing.requests.observer import phases

Order = Literal["newest", "slowest"]


def request_report(active: ActiveRequest) -> dict[str, Any]:
    """Return the report of one request, without text and tokens."""
    facts = facts_of(active)
    cause, sentence, cost_s = why(facts)
    return {
        **active.explain(),
        "elapsed_s": round(facts.elapsed_s, 6),
        "phases_s": {name: round(took_s, 6) for name, took_s in facts.phases_s.items()},
        "why": {"cause": cause, "sentence": sentence, "cost_s": round(cost_s, 6)},
    }


def report_of(kept: KeptRecords, name: str, tenant: str | None = None) -> dict[str, Any] | None:
    """Return the report of a request, or of the kept parts of a call; None if unknown.

    ``name`` may be the client's id, of which the latest is found (of this tenant, if any).
    """
    active = kept.get(name) or next(_named_by_client(kept, name, tenant), None)
    if active is not None:
        return request_report(active)
    parts = kept.parts(name)
    if parts is None:
        return None
    count, active_parts = parts
    return {"id": name, "requests": count, "parts": [request_report(part) for part in active_parts]}


def _named_by_client(kept: KeptRecords, name: str, tenant: str | None) -> Iterator[ActiveRequest]:
    """Yield the latest requests first; of a call with several parts only the last one is found."""
    for active in kept.newest_first():
        request = active.request
        if name and request.client_id == name and tenant in (None, request.tenant):
            yield active


def summary(active: ActiveRequest, now_ns: int) -> dict[str, Any]:
    """Return one line of the list of requests, cached once the request has ended."""
    made = active.summary or _summary(active)
    if active.observed and active.delivered_ns:
        active.summary = made
    return {**made, "age_s": round((now_ns - active.request.arrived_ns) / 1e9, 6)}


def _summary(active: ActiveRequest) -> dict[str, Any]:
    record = active.record
    request = active.request
    facts = facts_of(active)
    cause, sentence, _ = why(facts)
    first_ns = record.first_token_ns
    return {
        "id": active.id,
        "tenant": request.tenant,
        "state": facts.state,
        "status": active.status or None,
        "elapsed_s": round(facts.elapsed_s, 6),
        "first_token_s": round((first_ns - request.arrived_ns) / 1e9, 6) if first_ns else None,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "prefill": active.prefill_id or active.decode_id,
        "decode": active.decode_id,
        "mode": active.placement.chosen.mode if active.placement is not None else None,
        "attempts": record.attempt,
        "error": record.error.code if record.error is not None else None,
        "regret_s": round(active.regret.seconds, 6) if active.regret is not None else None,
        "cause": cause,
        "sentence": sentence,
    }


def past_reports(
    kept: Iterable[ActiveRequest], refused: Iterable[PastReport]
) -> Iterator[PastReport]:
    """Yield the reports of the latest ended requests, for the router's next process."""
    now_ns = monotonic_ns()
    for active in islice((active for active in kept if active.delivered_ns), KEPT):
        yield PastReport(
            tenant=active.request.tenant,
            client_id=active.request.client_id,
            arrived_ns=active.request.arrived_ns,
            summary=summary(active, now_ns),
            report=request_report(active),
        )
    yield from islice(refused, KEPT)


def latest(
    kept: Iterable[ActiveRequest],
    others: Sequence[Iterable[PastReport]],
    now_ns: int,
    *,
    tenant: str | None,
    limit: int,
    order: Order,
) -> list[dict[str, Any]]:
    """Return the newest or slowest requests, of one tenant or of all.

    ``kept``: requests of this process, newest first. ``others``: refused requests, and those of
    earlier processes, each newest first. ``now_ns``: time to which their ages refer.
    """
    own = (active for active in kept if tenant is None or active.request.tenant == tenant)
    if order == "slowest":
        slow = heapq.nlargest(limit, own, key=elapsed_s)
        lines = [summary(listed, now_ns) for listed in slow]
        for source in others:
            slowest = heapq.nlargest(limit, source, key=lambda listed: listed.elapsed_s)
            lines += [listed.line(now_ns) for listed in slowest]
        lines.sort(key=lambda line: line["elapsed_s"], reverse=True)
    else:
        lines = [summary(listed, now_ns) for listed in islice(own, limit)]
        for source in others:
            lines += [listed.line(now_ns) for listed in islice(source, limit)]
        lines.sort(key=lambda line: line["age_s"])
    return lines[:limit]


def elapsed_s(active: ActiveRequest) -> float:
    """Return the time from arrival to the last byte, or until now."""
    end_ns = active.delivered_ns or monotonic_ns()
    return (end_ns - active.request.arrived_ns) / 1e9


def facts_of(active: ActiveRequest) -> Facts:
    """Return the input of `why`."""
    record = active.record
    times = active.record.times
    over = active.delivered_ns > 0
    placement = active.placement
    placed_on = placement.chosen.computes.worker_id if placement is not None else ""
    computes = active.prefill_id or active.decode_id or placed_on
    route = record.route
    if route is not None:
        computes = route.prefill_worker_id or computes
    gaps = active.gaps
    chosen = active.placement.chosen if active.placement else None
    compared = active.placement.candidates if active.placement else ()
    others = {
        worker.worker_id: worker
        for candidate in compared
        if (worker := candidate.computes).worker_id != computes
    }
    phases_s = phases(active, active.exposed_s) if over else _phases_so_far(active)
    return Facts(
        elapsed_s=elapsed_s(active),
        phases_s=phases_s,
        state="ended" if record.ended else "running" if active.decode_id else "queued",
        error=f"{record.error.code} ({record.error.message})" if record.error is not None else "",
        prefix_wait_s=_prefix_wait_s(active),
        worker_queue_s=times.queue_ns / 1e9 if times is not None else 0.0,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        completion_tokens=record.completion_tokens,
        prefill_worker=computes,
        decode_worker=route.decode_worker_id if route is not None else active.decode_id or "",
        prefill_s=phases_s.get("prefill", 0.0) if times is not None else 0.0,
        peers_prefill_tokens_per_s=_peers_rate(list(others.values())),
        held_elsewhere_tokens=min(
            max((worker.cached_blocks for worker in others.values()), default=0) * BLOCK_TOKENS,
            max(record.prompt_tokens - 1, 0),
        ),
        expected_step_s=chosen.decode.decode_step_s if chosen is not None else 0.0,
        lost_to_repairs_s=_lost_to_repairs_s(active),
        repairs=_repairs_of(active),
        repaired_frames=times.repaired_chunks if times is not None else 0,
        transfer_bytes=times.transfer_bytes if times is not None else 0,
        preemptions=times.preemptions if times is not None else 0,
        usual_gap_s=gaps.usual_s,
        paused_s=record.paused_ns / 1e9,
        moves=tuple(record.moves),
        stalls_s=tuple(gap.seconds for gap in gaps.longest),
        stalled_before_token=gaps.longest[0].before_token if gaps.longest else 0,
    )


def _phases_so_far(active: ActiveRequest) -> dict[str, float]:
    record = active.record
    now_ns = monotonic_ns()
    marks = [
        ("tokenize", active.submitted_ns),
        ("queue", active.placed_ns),
        ("prefill", record.first_token_ns),
        ("decode", now_ns),
    ]
    parts = {}
    begin_ns = record.request.arrived_ns
    for name, end_ns in marks:
        parts[name] = ((end_ns or now_ns) - begin_ns) / 1e9
        if not end_ns:
            break
        begin_ns = end_ns
    return parts


def _prefix_wait_s(active: ActiveRequest) -> float:
    """Return how long the request waited for a prefix before its first placement."""
    begun = [at_ns for event, at_ns in active.record.timeline if event.startswith("waits for the")]
    placed = [at_ns for event, at_ns in active.record.timeline if event.startswith("placed on")]
    return (placed[0] - begun[0]) / 1e9 if begun and placed else 0.0


def _peers_rate(others: list[WorkerLoad]) -> float:
    """Return the median rate of other workers: of the prefill pool if there is one, else of all."""
    prefills = [worker.prefill_tokens_per_s for worker in others if worker.role == "prefill"]
    rates = prefills or [worker.prefill_tokens_per_s for worker in others]
    return median(rates) if rates else 0.0


def _is_repair(event: str) -> bool:
    return (event.startswith("prefill ") and " failed: " in event) or event.startswith(
        "worker lost"
    )


def _before_first_token(active: ActiveRequest) -> list[tuple[str, int]]:
    first_ns = active.record.first_token_ns or monotonic_ns()
    return [(event, at_ns) for event, at_ns in active.record.timeline if at_ns <= first_ns]


def _repairs_of(active: ActiveRequest) -> tuple[str, ...]:
    """Return repairs; after a migration only those before the first token."""
    moved = bool(active.record.moves)
    timeline = _before_first_token(active) if moved else active.record.timeline
    return tuple(event for event, _ in timeline if _is_repair(event))


def _lost_to_repairs_s(active: ActiveRequest) -> float:
    timeline = _before_first_token(active)
    placed = [at_ns for event, at_ns in timeline if event.startswith("placed on")]
    repaired = [
        at_ns
        for event, at_ns in timeline
        if _is_repair(event) or event.startswith(("prefill replaced", "placed on"))
    ]
    if not any(_is_repair(event) for event, _ in timeline) or not placed:
        return 0.0
    return max(max(repaired) - min(placed), 0) / 1e9
