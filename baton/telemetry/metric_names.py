"""Every metric that Baton exports, declared in one table.

Names start with ``baton_``, units are in them. ``vllm:*`` aliases stand in the last column, for the
names that people already graph. To add a metric: declare it here and set it where it happens.
"""

from typing import Literal, NamedTuple

Kind = Literal["counter", "gauge", "histogram"]
Together = Literal["max", "sum", "min"]

_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536, 262144)


class MetricSpec(NamedTuple):
    """One metric. Counters are named without ``_total``, which the exposition adds.

    ``vllm`` is the alias of all series; ``vllm_by_label`` has pairs (value of the only label,
    alias) where vLLM has a metric of its own for what is one series here. ``from_start`` has values
    of the only label whose series are there before anything happened: a rate over a series that
    appears with its first event misses that event.

    ``together``: what a gauge of several routers with one port is. Most describe the fleet, which
    each of them sees whole: the largest; ``sum`` is of those that are a router's own.
    """

    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    vllm: str | None = None
    vllm_by_label: tuple[tuple[str, str], ...] = ()
    from_start: tuple[str, ...] = ()
    together: Together = "max"


def _count(
    text: str,
    *labels: str,
    vllm: str | None = None,
    vllm_by_label: tuple[tuple[str, str], ...] = (),
    from_start: tuple[str, ...] = (),
) -> MetricSpec:
    return MetricSpec("counter", text, labels, (), vllm, vllm_by_label, from_start)


def _gauge(
    text: str, *labels: str, vllm: str | None = None, together: Together = "max"
) -> MetricSpec:
    return MetricSpec("gauge", text, labels, vllm=vllm, together=together)


def _seconds(
    text: str,
    *labels: str,
    vllm: str | None = None,
    vllm_by_label: tuple[tuple[str, str], ...] = (),
) -> MetricSpec:
    return MetricSpec("histogram", text, labels, _SECONDS, vllm, vllm_by_label)


def _sizes(text: str, *labels: str, vllm: str | None = None) -> MetricSpec:
    return MetricSpec("histogram", text, labels, _COUNTS, vllm)


# A request as the router sees it. Durations are taken on the router's clock only.
REQUEST_METRICS: dict[str, MetricSpec] = {
    "baton_requests": _count(
        "Requests that ended, by HTTP status.", "endpoint", "status", "tenant"
    ),
    "baton_finished_choices": _count(
        "Choices that ended, by finish reason.", "reason", "tenant", vllm="request_success"
    ),
    "baton_stored_responses": _count(
        "Responses of /v1/responses that were to be kept, by what became of them.",
        "result",
        from_start=("stored", "too_large", "failed"),
    ),
    "baton_rejections": _count("Requests refused, by error code.", "code", "tenant"),
    "baton_ignored_fields": _count(
        "Fields of bodies that nobody knows and that were left aside, by the object they stood in.",
        "where",
    ),
    "baton_timeouts": _count(
        "Requests whose deadline passed, by phase.",
        "phase",
        from_start=(
            "queue",
            "prefill",
            "decode",
        ),
    ),
    "baton_cancellations": _count(
        "Requests whose client went away, by phase.",
        "phase",
        from_start=(
            "queue",
            "prefill",
            "decode",
        ),
    ),
    "baton_release_seconds": _seconds("Cancel or timeout to the worker's confirmed end."),
    "baton_phase_seconds": _seconds(
        "Parts of a request: queue, tokenize, prefill, transfer, decode, delivery, unattributed. "
        "They add up to baton_e2e_seconds.",
        "phase",
        vllm_by_label=(
            ("queue", "request_queue_time_seconds"),
            ("prefill", "request_prefill_time_seconds"),
            ("decode", "request_decode_time_seconds"),
        ),
    ),
    "baton_request_prompt_tokens": _sizes(
        "Prompt tokens of a request.", vllm="request_prompt_tokens"
    ),
    "baton_request_generation_tokens": _sizes(
        "Tokens sent of a request.", vllm="request_generation_tokens"
    ),
    "baton_transfer_exposed_seconds": _seconds(
        "Hand-off time not hidden by compute: first to second token, less a median decode step."
    ),
    "baton_time_to_first_token_seconds": _seconds(
        "Arrival at the router to the first content byte out.",
        "tenant",
        vllm="time_to_first_token_seconds",
    ),
    "baton_time_to_second_token_seconds": _seconds("Arrival to the second token."),
    "baton_inter_token_seconds": _seconds(
        "Each gap between two tokens of one request.", vllm="inter_token_latency_seconds"
    ),
    "baton_time_per_output_token_seconds": _seconds(
        "(last token - first token) / (n - 1), per request.",
        "tenant",
        vllm="request_time_per_output_token_seconds",
    ),
    "baton_e2e_seconds": _seconds(
        "Arrival to the last byte out.", "tenant", vllm="e2e_request_latency_seconds"
    ),
    "baton_prompt_tokens": _count("Prompt tokens of all requests.", "tenant", vllm="prompt_tokens"),
    "baton_prefix_queries_tokens": _count(
        "Prompt tokens that were looked for in a cache.", vllm="prefix_cache_queries"
    ),
    "baton_generation_tokens": _count("Tokens sent.", "tenant", vllm="generation_tokens"),
    "baton_prefix_tokens": _count(
        "Prompt tokens by where their KV came from: local, memory, disk, pulled, peer, computed.",
        "source",
        vllm_by_label=(("local", "prefix_cache_hits"),),
    ),
    "baton_adapter_requests": _count("Requests that a LoRA adapter answered.", "adapter"),
    "baton_adapter_prompt_tokens": _count("Prompt tokens of these requests.", "adapter"),
    "baton_adapter_generation_tokens": _count("Tokens sent of these requests.", "adapter"),
    "baton_grammar_compile_seconds": _seconds("Trying a new grammar before admission."),
    "baton_grammar_refusals": _count(
        "Grammars refused: invalid, too_large, too_expensive.", "reason"
    ),
    "baton_schema_violations": _count(
        "Complete answers of `strict: false` that do not keep a keyword that no grammar follows.",
        "keyword",
    ),
    "baton_grammar_incomplete": _count(
        "Choices with a grammar that were cut before the grammar was satisfied.", "reason"
    ),
    "baton_queue_requests": _gauge("Requests waiting for a placement.", "tenant", together="sum"),
    "baton_queue_limit_requests": _gauge("Size of the queue; beyond it 429."),
}

# What the router decides and what goes wrong around it.
ROUTER_METRICS: dict[str, MetricSpec] = {
    "baton_routes": _count(
        "Placements by mode: disaggregated, colocated.",
        "mode",
        from_start=(
            "disaggregated",
            "colocated",
        ),
    ),
    "baton_fallbacks": _count(
        "Placements that differ from the first choice.", "reason", from_start=("local prefill",)
    ),
    "baton_retries": _count(
        "Requests placed again before any token, by reason.",
        "reason",
        from_start=(
            "worker lost",
            "worker leaving",
            "prefill replaced",
            "submit failed",
        ),
    ),
    "baton_migrations": _count(
        "Answers that went on at another worker, behind the tokens that they had, by reason.",
        "reason",
        from_start=(
            "worker lost",
            "worker leaving",
        ),
    ),
    "baton_stream_errors": _count(
        "Streams to workers that broke.",
        "kind",
        from_start=(
            "broken",
            "refused",
            "dead",
        ),
    ),
    "baton_poison_requests": _count("Requests ended because workers died of them."),
    "baton_predicted_seconds": _seconds("Predicted cost of the placement chosen.", "mode"),
    "baton_actual_seconds": _seconds("Measured cost of the placement chosen.", "mode"),
    "baton_prediction_error_seconds": _seconds("Absolute error of the prediction.", "mode"),
    "baton_router_regret_seconds": _seconds(
        "Cost of the placement chosen less that of the best candidate, both priced afterwards.",
        "mode",
    ),
    "baton_workers": _gauge("Workers known, by role and state.", "role", "state"),
    "baton_batch_lines": _count(
        "Lines of batches that ended: completed, failed.",
        "outcome",
        from_start=("completed", "failed"),
    ),
    "baton_fleet_running_requests": _gauge(
        "Requests in the batches of all workers, as they last reported.",
        vllm="num_requests_running",
    ),
    "baton_fleet_waiting_requests": _gauge(
        "Requests that wait, at this router and at all workers.", vllm="num_requests_waiting"
    ),
    "baton_fleet_kv_usage_ratio": _gauge(
        "Leased blocks / total, of all workers.", vllm="kv_cache_usage_perc"
    ),
    "baton_client_timeouts": _count(
        "Clients that were too slow and were dropped: header, body, write.",
        "kind",
        from_start=(
            "header",
            "body",
            "write",
        ),
    ),
    "baton_connections_refused": _count("Connections beyond clients.max_connections."),
    "baton_open_connections": _gauge("Connections of clients.", together="sum"),
    "baton_intake_waiting": _gauge("Calls that wait for a turn of the event loop.", together="sum"),
    "baton_adapters_served": _gauge("LoRA adapters that clients may name."),
    "baton_mirror_names": _gauge("Block hashes in the prefix index."),
    "baton_mirror_sequence_gaps": _count("Holes found in a worker's event stream."),
    "baton_registry_records_skipped": _count("Registry records that could not be read."),
    "baton_mirror_snapshots": _count("Snapshots read to heal the prefix index."),
}

# A worker: its pool, its engine, its side of the hand-off.
WORKER_METRICS: dict[str, MetricSpec] = {
    "baton_kv_blocks": _gauge("KV blocks: total, free, cached, leased, quarantined.", "state"),
    "baton_kv_tier_blocks": _gauge(
        "Blocks below the pool, by tier (memory, disk) and state: held, total.", "tier", "state"
    ),
    "baton_kv_tier_moved_bytes": _count(
        "KV copied into a tier (saved) and back into the pool (brought).", "tier", "direction"
    ),
    "baton_kv_tier_failures": _count(
        "Blocks that were evicted before the tier had them (lost), came back wrong (damaged) or "
        "could not be written (failed), and prompts that waited no longer for theirs (late).",
        "tier",
        "reason",
    ),
    "baton_kv_usage_ratio": _gauge("Leased blocks / total.", vllm="kv_cache_usage_perc"),
    "baton_kv_evictions": _count("Cached blocks given up for new ones."),
    "baton_preemptions": _count("Requests preempted and recomputed.", vllm="num_preemptions"),
    "baton_spec_drafts": _count(
        "Rows that were computed with draft tokens behind them.", vllm="spec_decode_num_drafts"
    ),
    "baton_spec_draft_tokens": _count(
        "Draft tokens proposed.", vllm="spec_decode_num_draft_tokens"
    ),
    "baton_spec_accepted_tokens": _count(
        "Draft tokens that were accepted.", vllm="spec_decode_num_accepted_tokens"
    ),
    "baton_running_requests": _gauge("Requests in the batch.", vllm="num_requests_running"),
    "baton_waiting_requests": _gauge("Requests waiting.", vllm="num_requests_waiting"),
    "baton_step_seconds": _seconds("Engine steps: decode, prefill, mixed.", "kind"),
    "baton_batch_requests": _sizes("Requests per engine step."),
    "baton_batch_tokens": _sizes(
        "Tokens per engine step: prefill, decode.", "kind", vllm="iteration_tokens_total"
    ),
    "baton_prefix_tokens": _count(
        "Prompt tokens by where their KV came from: local, memory, disk, pulled, peer, computed.",
        "source",
    ),
    "baton_grammar_mask_seconds": _seconds("Of an engine step, what grammars took."),
    "baton_prefix_pulls": _count(
        "Pulls of cached prefixes from other workers by outcome: pulled, refused, late, abandoned.",
        "outcome",
        from_start=("pulled", "refused", "late", "abandoned"),
    ),
    "baton_transfers": _count(
        "Hand-offs by outcome: committed, failed, abandoned.",
        "outcome",
        from_start=(
            "committed",
            "failed",
        ),
    ),
    "baton_transfer_bytes": _count(
        "KV payload bytes: sent, received.",
        "direction",
        from_start=(
            "sent",
            "received",
        ),
    ),
    "baton_transfer_seconds": _seconds("First chunk asked for to commit."),
    "baton_credit_wait_seconds": _seconds("Of each pull of KV, for credit to receive."),
    "baton_pulled_bytes": _count(
        "KV payload bytes that were pulled and verified, as they were on the wire.",
        "transport",
        "encoding",
    ),
    "baton_transfer_fallbacks": _count(
        "Pulls that gRPC had to finish, by the transport that could not: late, broke, short, "
        "damaged.",
        "transport",
        "reason",
    ),
    "baton_loans_overdue": _count(
        "Slices lent to a reader on this host that were taken back before it let go."
    ),
    "baton_pulls_refused": _count(
        "Pulls of KV without a capability that lets the reader have it: missing, malformed, "
        "forged, expired.",
        "reason",
    ),
    "baton_chunks_refused": _count("Chunks that failed verification, by cause.", "cause"),
    "baton_chunks_repaired": _count("Chunks pulled again after damage."),
    "baton_orphans": _count("Requests that lapsed by lease."),
    "baton_quarantines": _count("Page ranges quarantined because a drain was not proven."),
    "baton_adapter_requests_info": _gauge(
        "Unix time; the labels name the adapters of live requests, loaded and not yet loaded.",
        "max_lora",
        "running_lora_adapters",
        "waiting_lora_adapters",
        vllm="lora_requests_info",
    ),
    "baton_adapters_held": _gauge("LoRA adapters in memory."),
    "baton_adapter_loads": _count(
        "LoRA adapters read from disk: loaded, failed.", "adapter", "outcome"
    ),
    "baton_adapter_evictions": _count("LoRA adapters that gave their place up.", "adapter"),
    "baton_adapter_load_seconds": _seconds("Time to read and prepare a LoRA adapter."),
    "baton_model_load_seconds": _gauge("Time to load the weights."),
    "baton_kv_events": _count("KV events published: stored, removed, cleared.", "kind"),
    "baton_kv_snapshots": _count("Whole sets published again after trouble with Redis."),
}

# Every process.
COMMON_METRICS: dict[str, MetricSpec] = {
    "baton_engine_info": _gauge(
        "1; the labels say whether engines are real or emulated, and by which timing model.",
        "engine",
        "timing",
    ),
    "baton_registry_connected": _gauge("1 while Redis answers.", together="min"),
    "baton_registry_errors": _count("Calls to Redis that failed."),
    "baton_task_failures": _count("Background tasks that raised, by their names.", "task"),
    "baton_label_overflows": _count("Label values folded into `other`.", "metric"),
}

METRICS_BY_COMPONENT: dict[str, dict[str, MetricSpec]] = {
    "router": {**REQUEST_METRICS, **ROUTER_METRICS, **COMMON_METRICS},
    "worker": {**WORKER_METRICS, **COMMON_METRICS},
}
