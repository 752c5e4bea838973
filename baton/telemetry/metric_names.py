"""Every metric that Baton exports, declared in one table.

Names start with ``baton_`` and contain their unit; ``vllm_names.py`` has those of vLLM. To add a
metric, declare it here and record it in the code.
"""

from typing import Any, Literal, NamedTuple

from baton.telemetry.vllm_names import BETWEEN_TOKENS_S, FIRST_TOKEN_S

Kind = Literal["counter", "gauge", "histogram"]
Together = Literal["max", "sum", "min"]

_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536, 262144)


class MetricSpec(NamedTuple):
    """Declaration of one metric. Counters omit ``_total``, which the exposition adds.

    ``from_start`` has values of the only label whose series exist before the first event: a rate
    over a series that appears with its first event misses that event.

    ``together`` combines the gauges of several routers that share a port. Most gauges describe the
    fleet, which each router sees whole, so the largest is taken; ``sum`` is for a router's own.
    ``is_alike``: of several models in a router the largest is taken, too, in place of the sum.
    """

    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    from_start: tuple[str, ...] = ()
    together: Together = "max"
    is_alike: bool = False


def _count(text: str, *labels: str, from_start: tuple[str, ...] = ()) -> MetricSpec:
    return MetricSpec("counter", text, labels, (), from_start)


def _gauge(text: str, *labels: str, **rules: Any) -> MetricSpec:
    return MetricSpec("gauge", text, labels, **rules)


def _seconds(text: str, *labels: str) -> MetricSpec:
    return MetricSpec("histogram", text, labels, _SECONDS)


def _sizes(text: str, *labels: str) -> MetricSpec:
    return MetricSpec("histogram", text, labels, _COUNTS)


# Requests as the router sees them. Durations are measured on the router's clock only.
REQUEST_METRICS: dict[str, MetricSpec] = {
    "baton_requests": _count("Finished requests by HTTP status.", "endpoint", "status", "tenant"),
    "baton_finished_choices": _count("Finished choices by reason.", "reason", "tenant"),
    "baton_stored_responses": _count(
        "Responses of /v1/responses that clients asked to store, by result.",
        "result",
        from_start=("stored", "too_large", "failed", "not_kept"),
    ),
    "baton_rejections": _count("Requests refused, by error code.", "code", "tenant"),
    "baton_ignored_fields": _count(
        "Unknown fields of request bodies that were ignored, by enclosing object.", "where"
    ),
    "baton_timeouts": _count(
        "Requests past their deadline, by phase.",
        "phase",
        from_start=("queue", "prefill", "decode"),
    ),
    "baton_cancellations": _count(
        "Requests whose client left, by phase.", "phase", from_start=("queue", "prefill", "decode")
    ),
    "baton_release_seconds": _seconds(
        "Time from cancellation or timeout to the worker's confirmation that the request ended."
    ),
    "baton_phase_seconds": _seconds(
        "Phases of a request: queue, tokenize, reservation, prefill, shared_steps, "
        "between_workers, transfer, decode, delivery, unattributed. They add up to "
        "baton_e2e_seconds.",
        "phase",
    ),
    "baton_request_prompt_tokens": _sizes("Prompt tokens per request."),
    "baton_request_generation_tokens": _sizes("Output tokens per request."),
    "baton_request_longest_choice_tokens": _sizes("Output tokens of a request's longest choice."),
    "baton_request_max_tokens": _sizes("Limit of output tokens per request (`max_tokens`)."),
    "baton_request_computed_tokens": _sizes("Prompt tokens computed per request."),
    "baton_request_choices": _sizes("Choices per request (`n`)."),
    "baton_request_preemptions": _sizes("Preemptions per request."),
    "baton_running_seconds": _seconds("Time of a request at workers, without waiting for them."),
    "baton_transfer_exposed_seconds": _seconds(
        "KV transfer time not hidden by computation: time from the first to the second token, less "
        "a median decode step."
    ),
    "baton_time_to_first_token_seconds": _seconds(
        "Time from arrival at the router to the first byte of content sent.", "tenant"
    ),
    "baton_time_to_second_token_seconds": _seconds("Time from arrival to the second token."),
    "baton_inter_token_seconds": _seconds("Time between two tokens of a request."),
    "baton_time_per_output_token_seconds": _seconds(
        "Mean time per output token of a request: (last token - first token) / (n - 1).", "tenant"
    ),
    "baton_e2e_seconds": _seconds("Time from arrival to the last byte sent.", "tenant"),
    "baton_prompt_tokens": _count("Prompt tokens of all requests.", "tenant"),
    "baton_prefix_queries_tokens": _count("Prompt tokens looked up in a cache."),
    "baton_generation_tokens": _count("Output tokens of all requests.", "tenant"),
    "baton_prefix_tokens": _count(
        "Prompt tokens by source of their KV: local, memory, disk, pulled, peer, computed.",
        "source",
    ),
    "baton_changed_prompts": _count(
        "Prompts that differ from an earlier one of their session within it.", "tenant"
    ),
    "baton_changed_prompt_tokens": _count(
        "Tokens that were equal behind such a difference, and not found in the cache.", "tenant"
    ),
    "baton_adapter_requests": _count("Requests served with a LoRA adapter.", "adapter"),
    "baton_adapter_prompt_tokens": _count("Prompt tokens with a LoRA adapter.", "adapter"),
    "baton_adapter_generation_tokens": _count("Output tokens with a LoRA adapter.", "adapter"),
    "baton_grammar_compile_seconds": _seconds("Time to check a new grammar before admission."),
    "baton_grammar_refusals": _count(
        "Rejected grammars: invalid, too_large, too_expensive.", "reason"
    ),
    "baton_schema_violations": _count(
        "Complete responses with `strict: false` that violate a keyword outside the grammar.",
        "keyword",
    ),
    "baton_grammar_incomplete": _count("Choices cut before their grammar was satisfied.", "reason"),
    "baton_queue_requests": _gauge("Requests waiting for a placement.", "tenant", together="sum"),
    "baton_golden_prompts": _count(
        "Golden prompts by result: right, wrong, failed.", "model", "version", "result"
    ),
    "baton_model_rollbacks": _count(
        "Canaries and shadows that were ended by their gates.", "model"
    ),
    "baton_shadow_requests": _count(
        "Copies of requests by result: same, different, answered (not compared), failed, refused, "
        "left_out.",
        "model",
        "result",
    ),
    "baton_slo_requests": _count(
        "Requests with latency limits by outcome: good, late, refused, failed.",
        "outcome",
        from_start=("good", "late", "refused", "failed"),
    ),
    "baton_slo_tenant_requests": _count(
        "The same requests, by outcome and tenant.", "outcome", "tenant"
    ),
    "baton_role_turns": _gauge("Number of the last change of a worker's role in this fleet."),
    "baton_planner_wanted": _gauge(
        "Workers by the planner, by role, also while it may not act; 0 without a planner.", "role"
    ),
    "baton_planner_load_ratio": _gauge(
        "Needs ÷ workers of the fuller role, at the best split of the ready workers. From 1 on, "
        "no split holds the load."
    ),
    "baton_charged_seconds": _count(
        "Worker time of requests, by part: input, output. The rest of the workers' time is idle.",
        "part",
        "tenant",
    ),
    "baton_worker_price_per_hour": _gauge(
        "Price of one worker for one hour (pools.auto.price_per_hour)."
    ),
    "baton_slo_wasted_prompt_tokens": _count(
        "Prompt tokens computed for responses that missed their latency limits."
    ),
    "baton_queue_limit_requests": _gauge("Queue limit; beyond it requests are rejected with 429."),
}

# By OpenTelemetry's conventions for generative AI, with their buckets and attributes.
_GEN_AI = (
    *("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"),
    *("gen_ai_response_model", "server_address", "server_port"),
)
GEN_AI_METRICS: dict[str, MetricSpec] = {
    "gen_ai_server_request_duration_seconds": MetricSpec(
        "histogram",
        "Time of a call from its arrival to its last byte (gen_ai.server.request.duration).",
        (*_GEN_AI, "error_type"),
        tuple(0.01 * 2**power for power in range(14)),
    ),
    "gen_ai_server_time_to_first_token_seconds": MetricSpec(
        "histogram",
        "Time to the first token of successful responses (gen_ai.server.time_to_first_token).",
        _GEN_AI,
        FIRST_TOKEN_S[:16],
    ),
    "gen_ai_server_time_per_output_token_seconds": MetricSpec(
        "histogram",
        "Time per token after the first of successful responses "
        "(gen_ai.server.time_per_output_token).",
        _GEN_AI,
        BETWEEN_TOKENS_S[:13],
    ),
}

# Decisions of the router, and failures around it.
ROUTER_METRICS: dict[str, MetricSpec] = {
    "baton_routes": _count(
        "Placements by mode: disaggregated, colocated.",
        "mode",
        from_start=("disaggregated", "colocated"),
    ),
    "baton_prefix_waits": _count(
        "Requests that waited while another one computed the prefix of their prompt."
    ),
    "baton_fallbacks": _count(
        "Placements that differ from the first choice, by reason.",
        "reason",
        from_start=("local prefill",),
    ),
    "baton_retries": _count(
        "Requests placed again before their first token, by reason.",
        "reason",
        from_start=("worker lost", "worker leaving", "prefill replaced", "submit failed"),
    ),
    "baton_migrations": _count(
        "Responses resumed on another worker, by reason.",
        "reason",
        from_start=("worker lost", "worker leaving"),
    ),
    "baton_stream_errors": _count(
        "Broken streams to workers.", "kind", from_start=("broken", "refused", "dead")
    ),
    "baton_poison_requests": _count("Requests ended because two workers died while serving them."),
    "baton_predicted_seconds": _seconds("Predicted cost of the chosen placement.", "mode"),
    "baton_actual_seconds": _seconds("Measured cost of the chosen placement.", "mode"),
    "baton_prediction_error_seconds": _seconds("Absolute error of the predicted cost.", "mode"),
    "baton_router_regret_seconds": _seconds(
        "Cost of the chosen placement minus that of the best candidate, both computed afterwards.",
        "mode",
    ),
    "baton_workers": _gauge("Workers in the registry, by role and state.", "role", "state"),
    "baton_workers_wanted": _gauge("Workers that should be ready; not those drained.", "role"),
    "baton_batch_lines": _count(
        "Batch lines: completed, failed.", "outcome", from_start=("completed", "failed")
    ),
    "baton_fleet_running_requests": _gauge(
        "Requests in the batches of all workers, by their latest reports."
    ),
    "baton_fleet_waiting_requests": _gauge("Requests waiting in this router and in all workers."),
    "baton_fleet_kv_usage_ratio": _gauge(
        "Share of KV blocks in use, over all workers of a model; the largest of the models.",
        is_alike=True,
    ),
    "baton_client_timeouts": _count(
        "Client connections closed for slowness, by phase: header, body, write.",
        "kind",
        from_start=("header", "body", "write"),
    ),
    "baton_connections_refused": _count("Connections refused beyond clients.max_connections."),
    "baton_connections_evicted": _count("Connections without a call that made room for others."),
    "baton_open_connections": _gauge("Open client connections.", together="sum"),
    "baton_intake_waiting": _gauge("Calls waiting for the event loop.", together="sum"),
    "baton_adapters_served": _gauge("LoRA adapters available to clients."),
    "baton_audit_failures": _count("Audit entries that could not be written at once."),
    "baton_keys": _gauge("API keys of `baton keys`: valid, expired or revoked.", "state"),
    "baton_quota_tokens": _gauge(
        "Tokens that a tenant has used or reserved of a limit (tpm, tpd, budget), at all routers. "
        "A router shows the first 80 tenants that call it.",
        "tenant",
        "kind",
    ),
    "baton_quota_limit_tokens": _gauge("The limit of `baton_quota_tokens`.", "tenant", "kind"),
    "baton_quota_debt_tokens": _gauge(
        "Tokens that tenants have used above their limits, for which later calls wait."
    ),
    "baton_quota_refusals": _count(
        "Calls that a limit of their tenant refused: rpm, tpm, tpd, concurrent or budget.",
        "tenant",
        "limit",
    ),
    "baton_file_stale": _gauge(
        "1 while a file that is read again when it changes (`api_keys`, `tenants`) is wrong, and "
        "its last good value is in use.",
        "file",
    ),
    "baton_keys_age_seconds": _gauge(
        "Time since the router compared its API keys with Redis; without Redis it grows."
    ),
    "baton_prefix_index_hashes": _gauge("Block hashes in the prefix index."),
    "baton_prefix_index_sequence_gaps": _count("Gaps found in the event streams of workers."),
    "baton_prefix_index_snapshots": _count("Snapshots read to repair the prefix index."),
    "baton_registry_records_skipped": _count("Registry records that could not be read."),
}

# A worker: its KV pool, its engine, its side of KV transfers.
WORKER_METRICS: dict[str, MetricSpec] = {
    "baton_worker_seconds": _count(
        "Time that the worker exists, by role. Times the price, it is the worker's cost.", "role"
    ),
    "baton_kv_blocks": _gauge(
        "KV blocks by state: total, free, cached, leased, quarantined.", "state"
    ),
    "baton_kv_tier_blocks": _gauge(
        "KV blocks below the pool, by tier (memory, disk) and state: total, held, and elsewhere "
        "(on the disks of other workers that share the folder).",
        "tier",
        "state",
    ),
    "baton_kv_tier_moved_bytes": _count(
        "KV bytes copied into a tier (saved) and back into the pool (brought).", "tier", "direction"
    ),
    "baton_kv_tier_failures": _count(
        "Failures of a KV tier: blocks evicted before they were saved (lost), read back wrong "
        "(damaged), removed by another worker before they were read (gone) or not written "
        "(failed), and prompts that stopped waiting for blocks (late).",
        "tier",
        "reason",
    ),
    "baton_kv_usage_ratio": _gauge("Share of KV blocks in use."),
    "baton_kv_evictions": _count("Cached blocks evicted to make room."),
    "baton_preemptions": _count("Requests preempted and recomputed."),
    "baton_spec_drafts": _count("Sequence steps computed with draft tokens."),
    "baton_spec_draft_tokens": _count("Draft tokens proposed."),
    "baton_spec_accepted_tokens": _count("Draft tokens accepted."),
    "baton_running_requests": _gauge("Requests in the batch."),
    "baton_waiting_requests": _gauge("Requests waiting for admission to the batch."),
    "baton_step_seconds": _seconds("Time of an engine step: decode, prefill, mixed.", "kind"),
    "baton_batch_requests": _sizes("Requests per engine step."),
    "baton_batch_tokens": _sizes("Tokens per engine step: prefill, decode.", "kind"),
    "baton_prefix_tokens": _count(
        "Prompt tokens by source of their KV: local, memory, disk, pulled, peer, computed.",
        "source",
    ),
    "baton_step_tokens": _sizes("Tokens per engine step, of prompts and responses."),
    "baton_grammar_mask_seconds": _seconds("Time per engine step to compute grammar masks."),
    "baton_prefix_pulls": _count(
        "Prefix pulls from other workers, by outcome: pulled, refused, late, abandoned.",
        "outcome",
        from_start=("pulled", "refused", "late", "abandoned"),
    ),
    "baton_transfers": _count(
        "KV transfers by outcome: committed, failed, abandoned.",
        "outcome",
        from_start=("committed", "failed"),
    ),
    "baton_transfer_bytes": _count(
        "KV payload bytes: sent, received.", "direction", from_start=("sent", "received")
    ),
    "baton_transfer_seconds": _seconds("Time from the request for the first chunk to commit."),
    "baton_credit_wait_seconds": _seconds(
        "Time that a KV pull waits for permission to receive (credit)."
    ),
    "baton_pulled_bytes": _count(
        "KV payload bytes pulled and verified, as sent on the wire.", "transport", "encoding"
    ),
    "baton_transfer_fallbacks": _count(
        "Pulls completed by gRPC after another transport failed, by reason: late, broke, short, "
        "damaged.",
        "transport",
        "reason",
    ),
    "baton_loans_overdue": _count(
        "Slices lent to a reader on this host that were taken back before the reader released them."
    ),
    "baton_pulls_refused": _count(
        "KV pulls refused without a valid capability, by reason: missing, malformed, forged, "
        "expired.",
        "reason",
    ),
    "baton_chunks_refused": _count("Chunks that failed verification, by cause.", "cause"),
    "baton_chunks_repaired": _count("Damaged chunks that were pulled again."),
    "baton_orphans": _count("Requests ended because their lease lapsed."),
    "baton_quarantines": _count("Page ranges quarantined because a writer may still use them."),
    "baton_adapters_held": _gauge("LoRA adapters in memory."),
    "baton_adapter_loads": _count(
        "LoRA adapters read from disk: loaded, failed.", "adapter", "outcome"
    ),
    "baton_adapter_evictions": _count("LoRA adapters evicted from memory.", "adapter"),
    "baton_adapter_load_seconds": _seconds("Time to read and prepare a LoRA adapter."),
    "baton_model_load_seconds": _gauge("Time to load the weights."),
    "baton_kv_events": _count("KV events published: stored, removed.", "kind"),
    "baton_worker_asleep": _gauge("1 while the memory of the KV pool is given back."),
    "baton_kv_snapshots": _count("Full sets of block hashes published after a Redis failure."),
}

# Routers and workers.
COMMON_METRICS: dict[str, MetricSpec] = {
    "baton_kv_cache_info": _gauge(
        "Always 1; the labels have the size of the KV cache, of the fleet or one worker.",
        "block_size",
        "num_gpu_blocks",
        "num_cpu_blocks",
        "cache_dtype",
        "enable_prefix_caching",
        is_alike=True,
    ),
    "baton_adapter_requests_info": _gauge(
        "Unix time; the labels name the LoRA adapters of live requests: loaded, not yet loaded.",
        "max_lora",
        "running_lora_adapters",
        "waiting_lora_adapters",
        is_alike=True,
    ),
    "baton_build_info": _gauge("Always 1; the label is Baton's version.", "version"),
    "baton_engine_info": _gauge(
        "Always 1; the labels name the engine (real, emulated or vllm) and the timing model.",
        "engine",
        "timing",
    ),
    "baton_model_info": _gauge(
        "Always 1; the labels name each model, the digest of its weights and its number after `@`.",
        "model",
        "version",
        "number",
    ),
    "baton_registry_connected": _gauge("1 while Redis answers, else 0.", together="min"),
    "baton_registry_errors": _count("Failed calls to Redis."),
    "baton_task_failures": _count("Background tasks that raised, by name.", "task"),
    "baton_label_overflows": _count(
        "Label values counted as `other` because a metric has too many series.", "metric"
    ),
}

METRICS_BY_COMPONENT: dict[str, dict[str, MetricSpec]] = {
    "router": {**REQUEST_METRICS, **GEN_AI_METRICS, **ROUTER_METRICS, **COMMON_METRICS},
    "worker": {**WORKER_METRICS, **COMMON_METRICS},
}
