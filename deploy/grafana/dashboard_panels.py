"""What is asked in Grafana's dashboards: titles, units, PromQL."""

from collections.abc import Sequence
from dataclasses import dataclass

PRICE = "price_per_worker_hour"


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot.

    Attributes:
        unit: Grafana's name of the unit of all its queries.
        queries: Legend and PromQL of each line; ``$fleet`` is the fleet that was chosen.
        stacked: The lines add up.
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


def _quantile(share: float, metric: str, *by: str) -> str:
    return f"histogram_quantile({share}, {_rate(f'{metric}_bucket', *by, 'le')})"


def _mean(metric: str, *by: str) -> str:
    return f"{_rate(f'{metric}_sum', *by)} / {_rate(f'{metric}_count', *by)}"


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"p{share * 100:g}", _quantile(share, metric)) for share in (0.5, 0.95, 0.99))


def _gauge(metric: str, *by: str, where: str = "") -> str:
    grouped = f" by ({', '.join(by)})" if by else ""
    chosen = ", ".join(filter(None, ('fleet="$fleet"', where)))
    return f"sum{grouped} ({metric}{{{chosen}}})"


def _or_none(query: str) -> str:
    """0 where nothing has the metric: not every fleet has what it is about."""
    return f"({query}) or vector(0)"


def _counted(title: str, metric: str, *by: str, text: str = "") -> Panel:
    legend = " ".join(f"{{{{{label}}}}}" for label in by) or title
    return Panel(title, "short", ((legend, _rate(f"{metric}_total", *by)),), text=text)


_OUR_PREFIX = "baton_prefix_tokens_total"
_ROUTER = 'component="router"'
_FOUND_LOCALLY = f'{_ROUTER}, source="local"'
_PREFILL_ROWS = 'kind="prefill"'
_PREFILL_STEPS = 'kind=~"prefill|mixed"'
_PREFILL_SPEED = (
    f"{_rate('baton_batch_tokens_sum', 'worker', where=_PREFILL_ROWS)}"
    f" / ({_rate('baton_step_seconds_sum', 'worker', where=_PREFILL_STEPS)} > 0)"
)
_COST_A_SECOND = f'sum(baton_workers{{fleet="$fleet", state="ready"}}) * ${PRICE} / 3600'
_READ = _rate("baton_prompt_tokens_total")
_WRITTEN = _rate("baton_generation_tokens_total")

DASHBOARDS: dict[str, tuple[str, Sequence[Panel]]] = {
    "overview": (
        "Baton: overview",
        (
            Panel(
                "Workers by state",
                "short",
                (("{{role}} {{state}}", _gauge("baton_workers", "role", "state")),),
            ),
            Panel(
                "Requests a second by status",
                "reqps",
                (("{{status}}", _rate("baton_requests_total", "status")),),
                stacked=True,
            ),
            Panel("Time to first token", "s", _quantiles("baton_time_to_first_token_seconds")),
            Panel("Gap between tokens", "s", _quantiles("baton_inter_token_seconds")),
            Panel("Arrival to the last byte", "s", _quantiles("baton_e2e_seconds")),
            Panel("Tokens a second", "short", (("prompt", _READ), ("written", _WRITTEN))),
            Panel(
                "The router's queue",
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
                    ("{{worker}} runs", _gauge("baton_running_requests", "worker")),
                    ("{{worker}} waits", _gauge("baton_waiting_requests", "worker")),
                ),
            ),
        ),
    ),
    "latency": (
        "Baton: latency by phase",
        (
            Panel(
                "Where the time of a request goes, mean",
                "s",
                (
                    (
                        "{{phase}}",
                        f"{_rate('baton_phase_seconds_sum', 'phase')} / ignoring(phase) "
                        f"group_left {_rate('baton_e2e_seconds_count')}",
                    ),
                ),
                stacked=True,
                text="The phases add up to arrival until the last byte out.",
            ),
            Panel(
                "Phases, p95",
                "s",
                (("{{phase}}", _quantile(0.95, "baton_phase_seconds", "phase")),),
            ),
            Panel(
                "Arrival to the second token", "s", _quantiles("baton_time_to_second_token_seconds")
            ),
            Panel("Time per output token", "s", _quantiles("baton_time_per_output_token_seconds")),
            Panel(
                "Engine steps by kind, mean",
                "s",
                (("{{worker}} {{kind}}", _mean("baton_step_seconds", "worker", "kind")),),
            ),
            Panel(
                "Prompt tokens a second of the time spent on prompts",
                "short",
                (("{{worker}}", _PREFILL_SPEED),),
                text="A worker's own speed, whatever it was given: a slow one stands apart.",
            ),
            Panel(
                "Requests in an engine step, mean",
                "short",
                (("{{worker}}", _mean("baton_batch_requests", "worker")),),
            ),
            Panel("Cancel to the worker's end", "s", _quantiles("baton_release_seconds")),
        ),
    ),
    "kv": (
        "Baton: KV cache and hand-off",
        (
            Panel(
                "KV blocks by state",
                "short",
                (
                    (
                        "{{worker}} {{state}}",
                        _gauge("baton_kv_blocks", "worker", "state", where='state!="total"'),
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "Leased part of the pool",
                "percentunit",
                (("{{worker}}", _gauge("baton_kv_usage_ratio", "worker")),),
            ),
            _counted("Evictions a second", "baton_kv_evictions", "worker"),
            _counted("Preemptions a second", "baton_preemptions", "worker"),
            Panel(
                "KV to and from tiers below the pool",
                "Bps",
                (
                    (
                        "{{tier}} {{direction}}",
                        _or_none(_rate("baton_kv_tier_moved_bytes_total", "tier", "direction")),
                    ),
                ),
            ),
            Panel(
                "Blocks that tiers lost a second",
                "short",
                (
                    (
                        "{{tier}} {{reason}}",
                        _or_none(_rate("baton_kv_tier_failures_total", "tier", "reason")),
                    ),
                ),
            ),
            Panel(
                "Prompt tokens by source, at the router",
                "short",
                (("{{source}}", _rate(_OUR_PREFIX, "source", where=_ROUTER)),),
                stacked=True,
            ),
            Panel(
                "Part of prompts that was cached",
                "percentunit",
                (
                    (
                        "cached",
                        f"{_rate(_OUR_PREFIX, where=_FOUND_LOCALLY)}"
                        f" / {_rate(_OUR_PREFIX, where=_ROUTER)}",
                    ),
                ),
            ),
            _counted("Hand-offs a second", "baton_transfers", "worker", "outcome"),
            Panel(
                "KV bytes a second",
                "Bps",
                (
                    (
                        "{{worker}} {{direction}}",
                        _rate("baton_transfer_bytes_total", "worker", "direction"),
                    ),
                ),
            ),
            Panel("Hand-off, first chunk to commit", "s", _quantiles("baton_transfer_seconds")),
            Panel(
                "Hand-off that a client waited for",
                "s",
                _quantiles("baton_transfer_exposed_seconds"),
            ),
            Panel(
                "The router's prefix index",
                "short",
                (
                    ("block hashes", _gauge("baton_prefix_index_hashes")),
                    ("gaps", _rate("baton_prefix_index_sequence_gaps_total")),
                ),
            ),
        ),
    ),
    "router": (
        "Baton: router decisions and regret",
        (
            Panel(
                "Placements by mode",
                "short",
                (("{{mode}}", _rate("baton_routes_total", "mode")),),
                stacked=True,
            ),
            Panel(
                "First token, predicted and actual, mean",
                "s",
                (
                    ("{{mode}} predicted", _mean("baton_predicted_seconds", "mode")),
                    ("{{mode}} actual", _mean("baton_actual_seconds", "mode")),
                ),
            ),
            Panel(
                "Error of the prediction, p95",
                "s",
                (("{{mode}}", _quantile(0.95, "baton_prediction_error_seconds", "mode")),),
            ),
            Panel(
                "Regret of a request",
                "s",
                (
                    ("{{mode}} mean", _mean("baton_router_regret_seconds", "mode")),
                    ("p95", _quantile(0.95, "baton_router_regret_seconds")),
                ),
                text="Cost of the choice less that of the best candidate, both priced afterwards.",
            ),
            Panel(
                "Regret as a part of all requests' time",
                "percentunit",
                (
                    (
                        "regret",
                        f"{_rate('baton_router_regret_seconds_sum')}"
                        f" / {_rate('baton_e2e_seconds_sum')}",
                    ),
                ),
            ),
            _counted("Fallbacks a second", "baton_fallbacks", "reason"),
        ),
    ),
    "faults": (
        "Baton: faults",
        (
            _counted("Requests that began anew", "baton_retries", "reason"),
            _counted("Answers that went on elsewhere", "baton_migrations", "reason"),
            _counted("Streams to workers that broke", "baton_stream_errors", "kind"),
            _counted("Deadlines that passed", "baton_timeouts", "phase"),
            _counted("Clients that went away", "baton_cancellations", "phase"),
            _counted("Clients that were too slow", "baton_client_timeouts", "kind"),
            Panel(
                "Requests refused",
                "short",
                (("{{code}}", f"{_rate('baton_rejections_total', 'code')} or vector(0)"),),
            ),
            _counted("Requests ended because workers died of them", "baton_poison_requests"),
            _counted("Requests that lapsed by lease", "baton_orphans", "worker"),
            Panel(
                "Chunks",
                "short",
                (
                    (
                        "{{worker}} refused",
                        f"{_rate('baton_chunks_refused_total', 'worker')} or vector(0)",
                    ),
                    ("{{worker}} pulled again", _rate("baton_chunks_repaired_total", "worker")),
                ),
            ),
            _counted("Page ranges quarantined", "baton_quarantines", "worker"),
            Panel(
                "Background tasks that raised",
                "short",
                (
                    (
                        "{{component}} {{task}}",
                        f"{_rate('baton_task_failures_total', 'component', 'task')} or vector(0)",
                    ),
                ),
            ),
            Panel(
                "Redis answers",
                "short",
                (
                    (
                        "{{component}} {{worker}}",
                        'min by (component, worker) (baton_registry_connected{fleet="$fleet"})',
                    ),
                ),
            ),
        ),
    ),
    "cost": (
        "Baton: cost per 1,000 tokens",
        (
            Panel(
                "Cost of 1,000 written tokens",
                "currencyUSD",
                (("written", f"1000 * {_COST_A_SECOND} / ({_WRITTEN} > 0)"),),
                text=f"All ready workers at ${PRICE} an hour each, divided by what they wrote.",
            ),
            Panel(
                "Cost of 1,000 tokens, read or written",
                "currencyUSD",
                (("all", f"1000 * {_COST_A_SECOND} / (({_READ} + {_WRITTEN}) > 0)"),),
            ),
            Panel(
                "Tokens a second for each ready worker",
                "short",
                (
                    (
                        "written",
                        f'{_WRITTEN} / sum(baton_workers{{fleet="$fleet", state="ready"}})',
                    ),
                ),
            ),
            Panel(
                "Part of the time that engines were busy",
                "percentunit",
                (("{{worker}}", _rate("baton_step_seconds_sum", "worker")),),
            ),
            Panel(
                "Written tokens a second by tenant",
                "short",
                (("{{tenant}}", _rate("baton_generation_tokens_total", "tenant")),),
                stacked=True,
            ),
        ),
    ),
}
