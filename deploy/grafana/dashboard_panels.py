"""Panels of the Grafana dashboards: titles, units, PromQL."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

PRICE = "price_per_worker_hour"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a dashboard.

    Attributes:
        unit: Grafana's name of the unit of all queries.
        queries: Legend and PromQL of each line; ``$fleet`` is the selected fleet.
        stacked: Whether the lines are stacked.
        text: Description.
    """

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False
    text: str = ""


def _rate(metric: str, *by: str, where: str = "") -> str:
    grouped = f" by ({', '.join(by)})" if by else ""
    chosen = ", ".join(filter(None, ('fleet="$fleet"', where)))
    return f"sum{grouped} (rate({metric}{{{chosen}}}[$__rate_interval]))"


def _rate_or_0(metric: str, *by: str) -> str:
    return f"{_rate(metric, *by)} or vector(0)"


def _charged(part: str, tokens: str) -> str:
    """Return the worker seconds of a token by tenant, with the label ``part``."""
    seconds = _rate("baton_charged_seconds_total", "tenant", where=f'part="{part}"')
    per_token = f"{seconds} / ({_rate(f'baton_{tokens}_tokens_total', 'tenant')} > 0)"
    return f'label_replace({per_token}, "part", "{part}", "", "")'


def _quantile(share: float, metric: str, *by: str) -> str:
    return f"histogram_quantile({share}, {_rate(f'{metric}_bucket', *by, 'le')})"


_p95 = partial(_quantile, 0.95)


def _mean(metric: str, *by: str) -> str:
    return f"{_rate(f'{metric}_sum', *by)} / {_rate(f'{metric}_count', *by)}"


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"p{share * 100:g}", _quantile(share, metric)) for share in (0.5, 0.95, 0.99))


def _gauge(metric: str, *by: str, where: str = "") -> str:
    grouped = f" by ({', '.join(by)})" if by else ""
    chosen = ", ".join(filter(None, ('fleet="$fleet"', where)))
    return f"sum{grouped} ({metric}{{{chosen}}})"


def _or_none(query: str) -> str:
    """Return 0 without the metric, which not every fleet has."""
    return f"({query}) or vector(0)"


def _plot(
    title: str, unit: str, legend: str, query: str, *, stacked: bool = False, text: str = ""
) -> Panel:
    """Return a panel with one query."""
    return Panel(title, unit, ((legend, query),), stacked, text)


def _by(
    title: str,
    unit: str,
    query: Callable[..., str],
    metric: str,
    *labels: str,
    **more: Any,
) -> Panel:
    """Return a panel with a line for each value of the labels."""
    legend = " ".join(f"{{{{{label}}}}}" for label in labels) or title
    return _plot(title, unit, legend, query(metric, *labels), **more)


def _counted(title: str, metric: str, *by: str) -> Panel:
    return _by(title, "short", _rate, f"{metric}_total", *by)


_OUR_PREFIX = "baton_prefix_tokens_total"
_AT_ROUTER = 'component="router"'
_FOUND_LOCALLY = f'{_AT_ROUTER}, source="local"'
_GOOD = 'outcome="good"'
_PREFILL_ROWS = 'kind="prefill"'
_PREFILL_STEPS = 'kind=~"prefill|mixed"'
_PREFILL_SPEED = (
    f"{_rate('baton_batch_tokens_sum', 'worker', where=_PREFILL_ROWS)}"
    f" / ({_rate('baton_step_seconds_sum', 'worker', where=_PREFILL_STEPS)} > 0)"
)
_COST_A_SECOND = f'sum(baton_workers{{fleet="$fleet", state="ready"}}) * ${PRICE} / 3600'
_PROMPT = _rate("baton_prompt_tokens_total")
_OUTPUT = _rate("baton_generation_tokens_total")

_OVERVIEW = (
    _by("Workers by state", "short", _gauge, "baton_workers", "role", "state"),
    _by(
        "Requests per second by status",
        "reqps",
        _rate,
        "baton_requests_total",
        "status",
        stacked=True,
    ),
    Panel("Time to first token", "s", _quantiles("baton_time_to_first_token_seconds")),
    Panel("Inter-token latency", "s", _quantiles("baton_inter_token_seconds")),
    Panel("End-to-end latency", "s", _quantiles("baton_e2e_seconds")),
    Panel("Tokens per second", "short", (("prompt", _PROMPT), ("output", _OUTPUT))),
    _plot(
        "Requests with latency limits per second",
        "short",
        "{{outcome}}",
        _rate("baton_slo_requests_total", "outcome"),
        stacked=True,
        text="The height is the offered load, the part that is good is the goodput.",
    ),
    _plot(
        "Requests within their latency limits, by tenant",
        "percentunit",
        "{{tenant}}",
        f"{_rate('baton_slo_tenant_requests_total', 'tenant', where=_GOOD)}"
        f" / ({_rate('baton_slo_tenant_requests_total', 'tenant')} > 0)",
    ),
    _plot(
        "Time to first token by prediction",
        "percentunit",
        "measured by predicted",
        f"{_rate('baton_actual_seconds_sum')} / ({_rate('baton_predicted_seconds_sum')} > 0)",
        text="From placement on. At 100 % the predictions of the latency limits are right.",
    ),
    _plot(
        "Ready workers by role",
        "short",
        "{{role}}",
        'max by (role) (baton_workers{fleet="$fleet", state="ready"})',
        stacked=True,
    ),
    _plot(
        "Sizes by the planner",
        "short",
        "{{role}}",
        'max by (role) (baton_planner_wanted{fleet="$fleet"})',
        stacked=True,
        text="Also while `baton scale hold` keeps it from acting.",
    ),
    _plot(
        "Load at the best split",
        "percentunit",
        "load",
        'max(baton_planner_load_ratio{fleet="$fleet"})',
        text="Needs by workers of the fuller role. From 100 % on, no split holds the load.",
    ),
    _plot(
        "Changes of roles since the start",
        "short",
        "changes",
        'max(baton_role_turns{fleet="$fleet"})',
    ),
    _plot(
        "Wasted prompt tokens per second",
        "short",
        "wasted",
        _rate("baton_slo_wasted_prompt_tokens_total"),
        text="Computed for responses that missed their latency limits.",
    ),
    Panel(
        "Router queue",
        "short",
        (
            ("waiting", _gauge("baton_queue_requests")),
            ("limit", _gauge("baton_queue_limit_requests")),
        ),
    ),
    Panel(
        "Requests at the workers",
        "short",
        (
            ("{{worker}} running", _gauge("baton_running_requests", "worker")),
            ("{{worker}} waiting", _gauge("baton_waiting_requests", "worker")),
        ),
    ),
)
_LATENCY = (
    _plot(
        "Request time by phase, mean",
        "s",
        "{{phase}}",
        f"{_rate('baton_phase_seconds_sum', 'phase')} / ignoring(phase) "
        f"group_left {_rate('baton_e2e_seconds_count')}",
        stacked=True,
        text="The phases add up to the end-to-end latency.",
    ),
    _by("Request time by phase, p95", "s", _p95, "baton_phase_seconds", "phase"),
    Panel("Time to second token", "s", _quantiles("baton_time_to_second_token_seconds")),
    Panel("Time per output token", "s", _quantiles("baton_time_per_output_token_seconds")),
    _by("Engine step duration by kind, mean", "s", _mean, "baton_step_seconds", "worker", "kind"),
    _plot(
        "Prompt tokens per second of prefill time",
        "short",
        "{{worker}}",
        _PREFILL_SPEED,
        text="Speed of each worker, independent of its load.",
    ),
    _by("Requests per engine step, mean", "short", _mean, "baton_batch_requests", "worker"),
    Panel("Time from cancel to release at the worker", "s", _quantiles("baton_release_seconds")),
)
_KV = (
    _plot(
        "KV blocks by state",
        "short",
        "{{worker}} {{state}}",
        _gauge("baton_kv_blocks", "worker", "state", where='state!="total"'),
        stacked=True,
    ),
    _by("Leased share of the KV pool", "percentunit", _gauge, "baton_kv_usage_ratio", "worker"),
    _counted("Evictions per second", "baton_kv_evictions", "worker"),
    _counted("Preemptions per second", "baton_preemptions", "worker"),
    _plot(
        "KV moved to and from tiers",
        "Bps",
        "{{tier}} {{direction}}",
        _or_none(_rate("baton_kv_tier_moved_bytes_total", "tier", "direction")),
    ),
    _plot(
        "KV blocks lost by tiers per second",
        "short",
        "{{tier}} {{reason}}",
        _or_none(_rate("baton_kv_tier_failures_total", "tier", "reason")),
    ),
    _plot(
        "Prompt tokens per second by source",
        "short",
        "{{source}}",
        _rate(_OUR_PREFIX, "source", where=_AT_ROUTER),
        stacked=True,
    ),
    _plot(
        "Prefix cache hit rate",
        "percentunit",
        "cached",
        f"{_rate(_OUR_PREFIX, where=_FOUND_LOCALLY)} / {_rate(_OUR_PREFIX, where=_AT_ROUTER)}",
    ),
    _counted("Hand-offs per second", "baton_transfers", "worker", "outcome"),
    _by("KV transfer rate", "Bps", _rate, "baton_transfer_bytes_total", "worker", "direction"),
    Panel("Hand-off duration, first chunk to commit", "s", _quantiles("baton_transfer_seconds")),
    Panel(
        "Hand-off time that delays the client", "s", _quantiles("baton_transfer_exposed_seconds")
    ),
    Panel(
        "Prefix index of the router",
        "short",
        (
            ("block hashes", _gauge("baton_prefix_index_hashes")),
            ("sequence gaps per second", _rate("baton_prefix_index_sequence_gaps_total")),
        ),
    ),
)
_ROUTER = (
    _by("Placements by mode", "short", _rate, "baton_routes_total", "mode", stacked=True),
    Panel(
        "TTFT predicted and actual, mean",
        "s",
        (
            ("{{mode}} predicted", _mean("baton_predicted_seconds", "mode")),
            ("{{mode}} actual", _mean("baton_actual_seconds", "mode")),
        ),
    ),
    _by("TTFT prediction error, p95", "s", _p95, "baton_prediction_error_seconds", "mode"),
    Panel(
        "Regret per request",
        "s",
        (
            ("{{mode}} mean", _mean("baton_router_regret_seconds", "mode")),
            ("p95", _p95("baton_router_regret_seconds")),
        ),
        text="Cost of the chosen placement minus that of the best, computed afterwards.",
    ),
    _plot(
        "Regret as a share of the end-to-end latency",
        "percentunit",
        "regret",
        f"{_rate('baton_router_regret_seconds_sum')} / {_rate('baton_e2e_seconds_sum')}",
    ),
    _counted("Fallbacks per second", "baton_fallbacks", "reason"),
)
_FAULTS = (
    _counted("Requests retried per second", "baton_retries", "reason"),
    _counted("Responses migrated per second", "baton_migrations", "reason"),
    _counted("Worker stream errors per second", "baton_stream_errors", "kind"),
    _counted("Deadlines exceeded per second", "baton_timeouts", "phase"),
    _counted("Requests cancelled per second", "baton_cancellations", "phase"),
    _counted("Client timeouts per second", "baton_client_timeouts", "kind"),
    _by("Requests rejected per second", "short", _rate_or_0, "baton_rejections_total", "code"),
    _counted("Poison requests per second", "baton_poison_requests"),
    _counted("Request leases expired per second", "baton_orphans", "worker"),
    Panel(
        "Damaged KV chunks per second",
        "short",
        (
            ("{{worker}} rejected", _rate_or_0("baton_chunks_refused_total", "worker")),
            ("{{worker}} pulled again", _rate("baton_chunks_repaired_total", "worker")),
        ),
    ),
    _counted("Quarantines per second", "baton_quarantines", "worker"),
    _by(
        "Background task failures per second",
        "short",
        _rate_or_0,
        "baton_task_failures_total",
        "component",
        "task",
    ),
    _plot(
        "Redis connected",
        "short",
        "{{component}} {{worker}}",
        'min by (component, worker) (baton_registry_connected{fleet="$fleet"})',
    ),
)
_COST = (
    _plot(
        "Cost per 1,000 output tokens",
        "currencyUSD",
        "output",
        f"1000 * {_COST_A_SECOND} / ({_OUTPUT} > 0)",
        text=f"Ready workers at ${PRICE} per hour each, divided by their output tokens.",
    ),
    _plot(
        "Cost per 1,000 prompt and output tokens",
        "currencyUSD",
        "all",
        f"1000 * {_COST_A_SECOND} / (({_PROMPT} + {_OUTPUT}) > 0)",
    ),
    _plot(
        "Output tokens per second and ready worker",
        "short",
        "output",
        f'{_OUTPUT} / sum(baton_workers{{fleet="$fleet", state="ready"}})',
    ),
    _by("Engine utilisation", "percentunit", _rate, "baton_step_seconds_sum", "worker"),
    _by(
        "Output tokens per second by tenant",
        "short",
        _rate,
        "baton_generation_tokens_total",
        "tenant",
        stacked=True,
    ),
    _plot(
        "Used part of the tenants' limits of tokens",
        "percentunit",
        "{{tenant}} {{kind}}",
        'max by (tenant, kind) (baton_quota_tokens{fleet="$fleet"} '
        '/ (baton_quota_limit_tokens{fleet="$fleet"} > 0))',
        text="Per minute (tpm), day (tpd) and calendar month (budget). Above 100 %: a debt.",
    ),
    _counted("Calls that a tenant's limit refused", "baton_quota_refusals", "tenant", "limit"),
    _plot(
        "Cost per hour by tenant",
        "currencyUSD",
        "{{tenant}}",
        f"{_rate('baton_charged_seconds_total', 'tenant')} * ${PRICE}",
        text="Worker time of requests. The rest of the workers' cost is idle time.",
        stacked=True,
    ),
    _plot(
        "Cost per 1,000 tokens by tenant and part",
        "currencyUSD",
        "{{tenant}} {{part}}",
        f"1000 / 3600 * ${PRICE} * ({_charged('input', 'prompt')} or "
        f"{_charged('output', 'generation')})",
        text="Worker time of prompts per prompt token, and of answers per output token.",
    ),
)
DASHBOARDS: dict[str, tuple[str, Sequence[Panel]]] = {
    "overview": ("Baton: overview", _OVERVIEW),
    "latency": ("Baton: latency by phase", _LATENCY),
    "kv": ("Baton: KV cache and hand-offs", _KV),
    "router": ("Baton: router decisions and regret", _ROUTER),
    "faults": ("Baton: faults", _FAULTS),
    "cost": ("Baton: cost per 1,000 tokens", _COST),
}
