"""Metrics of requests. Probes are not counted.

All durations are on the router's clock except those that the worker reports. The rest of a
request's time is the phase ``unattributed``, so that the phases always add up.
"""

from collections.abc import Callable
from statistics import median

from batonpb.common_pb2 import WorkerStatus
from batonpb.decode_pb2 import RequestTimes

from baton.registry.router_demands import PlannedSizes
from baton.telemetry.live_series import LiveSeries
from baton.telemetry.metrics import Metrics
from baton.telemetry.tracing import sampled_trace_id
from router.request import GenerationRequest
from router.routing.placement.regret import Allowance, MeasuredRequest, regret
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.call import Call
from router.routing.requests.record import RequestRecord
from router.routing.requests.slo_outcome import outcome

_AT_WORKERS = ("prefill", "shared_steps", "between_workers", "transfer", "decode")


class _Lanes:
    """Parts that the observers of all lanes of a router share."""

    def __init__(self) -> None:
        self.series = LiveSeries()
        self.queues: dict[int, tuple[int, int]] = {}  # waiting requests and their limit
        self.plans: dict[int, PlannedSizes] = {}


class Observer:
    """Turns events of the requests of one lane into metrics.

    Lanes of one router have the same metrics and series. ``beside`` is the observer of another
    lane, with whose gauges this one's are added up.
    """

    def __init__(self, metrics: Metrics, beside: "Observer | None" = None) -> None:
        self.metrics = metrics
        self.lanes: _Lanes = _Lanes() if beside is None else beside.lanes
        self.series = self.lanes.series
        self._gaps = metrics.histogram("baton_inter_token_seconds")
        self._sizes = (
            metrics.histogram("baton_request_prompt_tokens"),
            metrics.histogram("baton_request_generation_tokens"),
            metrics.histogram("baton_request_longest_choice_tokens"),
            metrics.histogram("baton_request_max_tokens"),
            metrics.histogram("baton_request_computed_tokens"),
            metrics.histogram("baton_request_choices"),
            metrics.histogram("baton_request_preemptions"),
        )
        self._running = metrics.histogram("baton_running_seconds")
        self._frame_gaps: dict[float, int] = {}  # gap in seconds: tokens
        self._regrets = Allowance()
        self.fitted: Callable[[str], WorkerStatus | None] = lambda _: None
        """Returns the rates that a worker reports, at the end of a request."""
        self.on_charged: Callable[[GenerationRequest, RequestTimes], None] = lambda *_: None
        """Receives the times that a worker computed for a request."""

    def queue(self, waiting: int, limit: int) -> None:
        """Record the length of the queue."""
        self.lanes.queues[id(self)] = waiting, limit
        queues = self.lanes.queues.values()
        self.metrics.set("baton_queue_requests", sum(n for n, _ in queues), tenant="all")
        self.metrics.set("baton_queue_limit_requests", sum(most for _, most in queues))

    def planned(self, plan: PlannedSizes) -> None:
        """Record the planner's last result."""
        self.lanes.plans[id(self)] = plan
        plans = self.lanes.plans.values()
        prefill = sum(plan.prefill for plan in plans)
        decode = sum(plan.decode for plan in plans)
        self.metrics.set("baton_planner_wanted", prefill, role="prefill")
        self.metrics.set("baton_planner_wanted", decode, role="decode")
        self.metrics.set("baton_planner_load_ratio", max(plan.load for plan in plans))

    def answered(
        self, endpoint: str, status: int, tenant: str, *, failed_stream: bool = False
    ) -> None:
        """Count an HTTP request that ended. ``failed_stream``: with an error after its start."""
        self.series.answered(status, failed=failed_stream)
        self.metrics.inc("baton_requests", endpoint=endpoint, status=str(status), tenant=tenant)

    def ended(self, call: Call) -> None:
        """Count a call that ended."""
        failed_stream = call.status == 200 and bool(call.errors)
        self.answered(call.endpoint, call.status, call.label, failed_stream=failed_stream)

    def charged(self, active: ActiveRequest, times: RequestTimes) -> None:
        """Count the time that a worker computed for a request."""
        self.on_charged(active.request, times)
        tenant = active.request.tenant
        for part, part_ns in (("input", times.input_ns), ("output", times.output_ns)):
            self.metrics.inc("baton_charged_seconds", part_ns / 1e9, part=part, tenant=tenant)

    def refused(self, call: Call) -> None:
        """Count a call that got an error in place of a response."""
        if call.error is not None:
            self.metrics.inc("baton_rejections", code=call.error.code, tenant=call.label)

    def placed(self, active: ActiveRequest) -> None:
        """Count the placement of a request."""
        if active.request.probe or active.placement is None:
            return
        chosen = active.placement.chosen
        mode = chosen.mode
        predicted_s = chosen.terms.first_token_s
        self.metrics.inc("baton_routes", mode=mode)
        self.metrics.observe("baton_predicted_seconds", predicted_s, mode=mode)

    def retried(self, reason: str, *, goes_on: bool = False) -> None:
        """Count a request that was placed again; ``goes_on``: to resume its response."""
        if goes_on:
            self.metrics.inc("baton_migrations", reason=reason)
        else:
            self.metrics.inc("baton_retries", reason=reason)

    def task_failed(self, name: str) -> None:
        """Count a failed background task."""
        self.metrics.inc("baton_task_failures", task=name)

    def cancelled(self, active: ActiveRequest) -> None:
        """Count a client that disconnected."""
        if not active.request.probe:
            self.metrics.inc("baton_cancellations", phase=_phase(active))

    def timed_out(self, active: ActiveRequest) -> None:
        """Count a request whose deadline passed."""
        if not active.request.probe:
            self.metrics.inc("baton_timeouts", phase=_phase(active))

    def flush_gaps(self) -> None:
        """Record the gaps of a frame's tokens. Most have the same gap, which is counted."""
        for gap_s, tokens in self._frame_gaps.items():
            self._gaps.observe(gap_s, tokens)
            self.series.tokens(gap_s, tokens)
        self._frame_gaps.clear()

    def tokens(self, active: ActiveRequest, before_ns: int, now_ns: int, fresh: int) -> None:
        """Note tokens; the previous ones arrived at ``before_ns`` (0: these are the first)."""
        if active.request.probe:
            return
        record = active.record
        if not before_ns:
            self.series.tokens(0.0, fresh)
            self.series.prompt(record.prompt_tokens - record.cached_tokens)
            if active.prefill_id is not None and active.decode_id is not None:
                self.series.handed_over(active.prefill_id, active.decode_id)
            if active.placement is not None:
                chosen = active.placement.chosen
                placed_ns = active.placement.placed_ns
                mode = chosen.mode
                actual_s = (now_ns - placed_ns) / 1e9
                error_s = abs(actual_s - chosen.terms.first_token_s)
                self.metrics.observe("baton_actual_seconds", actual_s, mode=mode)
                self.metrics.observe("baton_prediction_error_seconds", error_s, mode=mode)
            return
        if record.second_token_ns == now_ns:
            since_ns = now_ns - record.request.arrived_ns
            self.metrics.observe("baton_time_to_second_token_seconds", since_ns / 1e9)
        gap_s = (now_ns - before_ns) / 1e9 / fresh
        self._frame_gaps[gap_s] = self._frame_gaps.get(gap_s, 0) + fresh
        active.gaps.add(gap_s, fresh, record.completion_tokens - fresh, now_ns)
        if active.prefill_id is not None and (fresh == 1 or not active.gaps_s):
            active.gaps_s.append(gap_s * fresh)  # the first has what the hand-off takes

    def first_content(self, active: ActiveRequest, now_ns: int) -> None:
        """Record the time to the first content of a stream, or to the first token of a whole."""
        if not active.request.probe and not active.request.pooling:
            wait_s = (now_ns - active.request.arrived_ns) / 1e9
            tenant = active.request.tenant
            trace_id = sampled_trace_id(active.request.traceparent)
            self.metrics.observe(
                "baton_time_to_first_token_seconds", wait_s, tenant=tenant, trace_id=trace_id
            )
            self.series.first_token(wait_s)

    def record_finished(self, active: ActiveRequest) -> None:
        """Record a request that has ended for client and worker, once."""
        if active.observed or active.request.probe:
            return
        active.observed = True
        gaps_s = active.gaps_s
        active.gaps_s = []
        record = active.record
        tenant = active.request.tenant
        inc = self.metrics.inc
        observe = self.metrics.observe
        trace_id = sampled_trace_id(active.request.traceparent)
        observe(
            "baton_e2e_seconds",
            _between_s(record.request.arrived_ns, active.delivered_ns),
            tenant=tenant,
            trace_id=trace_id,
        )
        exposed_s = 0.0
        if len(gaps_s) >= 3:
            exposed_s = max(gaps_s[0] - median(gaps_s[1:]), 0.0)
            observe("baton_transfer_exposed_seconds", exposed_s)
        active.exposed_s = exposed_s
        self._regret(active)
        if (slo := active.request.slo) is not None:
            self._slo(active, outcome(active, slo, active.delivered_ns))
        self.series.ended(failed=record.error is not None)
        parts = phases(active, exposed_s)
        for phase, took_s in parts.items():
            observe("baton_phase_seconds", took_s, phase=phase)
        if not record.begun:
            return
        inc("baton_prompt_tokens", record.prompt_tokens, tenant=tenant)
        inc("baton_generation_tokens", record.completion_tokens, tenant=tenant)
        self._running.observe(sum(parts[phase] for phase in _AT_WORKERS))
        self._observe_sizes(active)
        inc("baton_prefix_queries_tokens", record.prompt_tokens)
        inc("baton_prefix_tokens", record.cached_tokens, source="local")
        computed = record.prompt_tokens - record.cached_tokens
        inc("baton_prefix_tokens", computed, source="computed")
        if (change := active.request.prompt_change) is not None:
            inc("baton_changed_prompts", tenant=tenant)
            inc("baton_changed_prompt_tokens", change.lost_tokens, tenant=tenant)
        if active.request.adapter is not None:
            self._answered_by(active.request.adapter.name, record)
        tokens = record.completion_tokens / active.request.sampling.n
        if tokens > 1:
            per_token_s = _between_s(record.first_token_ns, record.last_token_ns) / (tokens - 1)
            observe(
                "baton_time_per_output_token_seconds", per_token_s, tenant=tenant, trace_id=trace_id
            )
        for choice in record.choices:
            reason = choice.finish_reason or (record.error.code if record.error else "unknown")
            inc("baton_finished_choices", reason=reason, tenant=tenant)
            # Only the model's end token shows that a grammar was completed.
            sampling = active.request.sampling
            own_stop = (*active.request.shown.stops, *sampling.stop_token_ids)
            whole = reason in ("stop", "tool_calls") and choice.stop_reason not in own_stop
            if sampling.grammar and not whole:
                inc("baton_grammar_incomplete", reason=reason)

    def _observe_sizes(self, active: ActiveRequest) -> None:
        record = active.record
        sampling = active.request.sampling
        sizes = (
            record.prompt_tokens,
            record.completion_tokens,
            max(len(choice.token_ids) for choice in record.choices),
            sampling.max_tokens,
            record.prompt_tokens - record.cached_tokens,
            sampling.n,
            record.times.preemptions if record.times is not None else 0,
        )
        for histogram, size in zip(self._sizes, sizes, strict=True):
            histogram.observe(size)

    def _slo(self, active: ActiveRequest, ended: str) -> None:
        tenant = active.request.tenant
        self.metrics.inc("baton_slo_requests", outcome=ended)
        self.metrics.inc("baton_slo_tenant_requests", outcome=ended, tenant=tenant)
        self.series.ended_with_limits(ended)
        if ended == "late":
            computed = active.record.prompt_tokens - active.record.cached_tokens
            self.metrics.inc("baton_slo_wasted_prompt_tokens", computed)

    def _regret(self, active: ActiveRequest) -> None:
        record = active.record
        placement = active.placement
        times = record.times
        replaced = placement is None or active.prefill_id != placement.prefill_id or record.moves
        if placement is None or replaced or times is None or not record.finished:
            return
        if active.request.pooling or not self._regrets.take(active.delivered_ns):
            return
        result = regret(
            placement.chosen,
            placement.candidates,
            MeasuredRequest(
                queue_s=times.queue_ns / 1e9,
                compute_s=times.prefill_ns / 1e9,
                exposed_s=active.exposed_s,
                decode_s=max(
                    _between_s(record.first_token_ns, record.last_token_ns) - active.exposed_s, 0
                ),
                answer_tokens=max(record.completion_tokens // active.request.sampling.n, 1),
            ),
            self.fitted,
            prompt_tokens=record.prompt_tokens,
            choices=active.request.sampling.n,
        )
        active.regret = result
        mode = placement.chosen.mode
        self.metrics.observe("baton_router_regret_seconds", result.seconds, mode=mode)

    def _answered_by(self, adapter: str, record: RequestRecord) -> None:
        inc = self.metrics.inc
        inc("baton_adapter_requests", adapter=adapter)
        inc("baton_adapter_prompt_tokens", record.prompt_tokens, adapter=adapter)
        inc("baton_adapter_generation_tokens", record.completion_tokens, adapter=adapter)


def phases(active: ActiveRequest, exposed_s: float = 0.0) -> dict[str, float]:
    """Return the parts of an ended request's time in seconds, which add up to its total.

    ``exposed_s`` is the part of the second token's wait that the hand-off took.
    """
    record = active.record
    times = record.times if not record.moves else None  # those of the last worker only
    arrived_ns = record.request.arrived_ns
    end_ns = active.delivered_ns
    placed_ns = active.placed_ns or end_ns
    # The worker rounds differently: its parts must not exceed the time on this router's clock.
    window_s = _between_s(active.placed_ns, record.first_token_ns)
    reserve_s = worker_queue_s = prefill_s = computed_s = between_s = 0.0
    if times is not None:
        reserve_s = min(times.reserve_ns / 1e9, window_s)
        worker_queue_s = min(times.queue_ns / 1e9, window_s - reserve_s)
        prefill_s = min(times.prefill_ns / 1e9, window_s - reserve_s - worker_queue_s)
        rest_s = window_s - reserve_s - worker_queue_s - prefill_s
        between_s = min(max(times.first_ns / 1e9 - worker_queue_s - prefill_s, 0.0), rest_s)
        computed_s = min(times.input_ns / 1e9 or prefill_s, prefill_s)  # earlier workers send 0
    decode_s = _between_s(record.first_token_ns, record.last_token_ns) - exposed_s
    parts = {
        "tokenize": _between_s(arrived_ns, active.submitted_ns),
        "queue": _between_s(active.submitted_ns, placed_ns) + worker_queue_s,
        "reservation": reserve_s,
        "prefill": computed_s,
        "shared_steps": prefill_s - computed_s,
        "between_workers": between_s,
        "transfer": exposed_s,
        "decode": max(decode_s, 0.0),
        "delivery": _between_s(record.last_token_ns, end_ns),
    }
    total_s = _between_s(arrived_ns, end_ns)
    parts["unattributed"] = max(total_s - sum(parts.values()), 0.0)
    return parts


def _between_s(begin_ns: int, end_ns: int) -> float:
    return max(end_ns - begin_ns, 0) / 1e9 if begin_ns else 0.0


def _phase(active: ActiveRequest) -> str:
    if active.decode_id is None:
        return "queue"
    return "decode" if active.record.begun else "prefill"
