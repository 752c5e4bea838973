"""Series under the names, labels and buckets of vLLM, which dashboards and schedulers read.

Each is a sum over series of one metric of Baton, formed when a page is read: nothing is counted
twice. They have vLLM's labels ``engine`` (always 0) and ``model_name``, and exist from the start,
as they do there. Names that start with ``gpu_`` are of older versions, and still read.
"""

from collections.abc import Mapping
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_TRANSFER = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_REQUEST_TOKENS = tuple(mantissa * 10**power for power in range(8) for mantissa in (1, 2, 5))
"""Bounds of counts of tokens, of which vLLM has those up to the model's context."""

_CACHED = ("local", "memory", "disk", "peer", "pulled")
_OUTSIDE = _CACHED[1:]
_ALL = (*_CACHED, "computed")
_SOURCES = {
    "local_compute": ("computed",),
    "local_cache_hit": ("local",),
    "external_kv_transfer": _OUTSIDE,
}
_TIERS = {
    "device": ("local",),
    "host": ("memory",),
    "p2p": ("peer", "pulled"),
    "disk": ("disk",),
    "external_unspecified": (),
}
_REASONS = {
    "stop": ("stop", "tool_calls"),
    "length": ("length",),
    "abort": ("abort", "cancelled", "client_closed", "deadline_exceeded"),
    "error": (),
    "repetition": (),
}
_REFUSED = {"max_num_queued_reqs": ("queue_full", "slo_unreachable"), "max_num_queued_tokens": ()}


class VllmSeries(NamedTuple):
    """A metric of vLLM as a sum over series of a metric of Baton.

    Attributes:
        name: vLLM's name without ``vllm:``.
        of: Metric of Baton.
        by: Label of Baton's metric that decides which series count; others are summed over.
        label: Label of vLLM that has the keys of ``values``; empty: the only key is no label.
        values: vLLM's value to values of ``by``; without ``by`` the first one has all series.
        rest: vLLM's value for all other values of ``by``; empty: they do not count.
        keeps: Whether all labels of Baton's metric are kept.
        buckets: Upper bounds of vLLM's buckets.
        inverted: Whether vLLM's gauge is 1 when Baton's is 0.
        has_engine: Whether it has the label ``engine``, as nearly all.
    """

    name: str
    of: str
    by: str = ""
    label: str = ""
    values: Mapping[str, tuple[str, ...]] = MappingProxyType({"": ()})
    rest: str = ""
    keeps: bool = False
    buckets: tuple[float, ...] = ()
    inverted: bool = False
    has_engine: bool = True

    @property
    def full_name(self) -> str:
        """Name on the page, without ``_total``."""
        return f"vllm:{self.name}"

    @property
    def is_capped(self) -> bool:
        """True if vLLM has no bounds beyond the model's context."""
        return self.buckets is _REQUEST_TOKENS

    @property
    def groups(self) -> list[dict[str, str]]:
        """Labels of the series that exist from the start."""
        if self.keeps:
            return []
        keys = (*self.values, self.rest) if self.rest else tuple(self.values)
        return [{self.label: key} if self.label else {} for key in dict.fromkeys(keys)]

    def group_of(self, labels: Mapping[str, str]) -> dict[str, str] | None:
        """Return the labels of the series that one of Baton's is counted in; None: in none."""
        if self.keeps:
            return dict(labels)
        if not self.by:
            return self.groups[0]
        own = labels[self.by]
        key = next((key for key, owns in self.values.items() if own in owns), self.rest or None)
        if key is None:
            return None
        return {self.label: key} if self.label else {}


_OF_SOURCE = partial(VllmSeries, of="baton_prefix_tokens", by="source")
_TOKENS_BY_SOURCE = (
    _OF_SOURCE("prefix_cache_queries", values={"": _ALL}),
    _OF_SOURCE("gpu_prefix_cache_queries", values={"": _ALL}),
    _OF_SOURCE("prefix_cache_hits", values={"": ("local",)}),
    _OF_SOURCE("gpu_prefix_cache_hits", values={"": ("local",)}),
    _OF_SOURCE("external_prefix_cache_queries", values={"": (*_OUTSIDE, "computed")}),
    _OF_SOURCE("external_prefix_cache_hits", values={"": _OUTSIDE}),
    _OF_SOURCE("prompt_tokens_by_source", label="source", values=_SOURCES),
    _OF_SOURCE("prompt_tokens_cached", values={"": _CACHED}),
    _OF_SOURCE("prompt_tokens_cached_by_source", label="source", values=_TIERS),
)
_WAITS: Mapping[str, tuple[str, ...]] = {"capacity": (), "deferred": ()}


def _load(running: str, waiting: str, usage: str) -> tuple[VllmSeries, ...]:
    """Return the series of load; Baton defers no requests, which vLLM counts apart."""
    return (
        VllmSeries("cache_config_info", "baton_kv_cache_info", keeps=True),
        VllmSeries("lora_requests_info", "baton_adapter_requests_info", keeps=True),
        VllmSeries("num_requests_running", running),
        VllmSeries("num_requests_waiting", waiting),
        VllmSeries("num_requests_waiting_by_reason", waiting, label="reason", values=_WAITS),
        VllmSeries("kv_cache_usage_perc", usage),
        VllmSeries("gpu_cache_usage_perc", usage),
    )


_TOKENS = partial(VllmSeries, buckets=_REQUEST_TOKENS)
_LATENCY_OF = partial(VllmSeries, buckets=_LATENCY)
_PHASE = partial(_LATENCY_OF, of="baton_phase_seconds", by="phase")
_PER_TOKEN = "baton_time_per_output_token_seconds"  # noqa: S105 - a name of a metric
_FIRST = "baton_time_to_first_token_seconds"
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_ROUTER = (
    *_load(
        "baton_fleet_running_requests", "baton_fleet_waiting_requests", "baton_fleet_kv_usage_ratio"
    ),
    *_TOKENS_BY_SOURCE,
    VllmSeries("prompt_tokens", "baton_prompt_tokens"),
    VllmSeries("generation_tokens", "baton_generation_tokens"),
    VllmSeries(
        "request_success", "baton_finished_choices", "reason", "finished_reason", _REASONS, "error"
    ),
    VllmSeries(
        "admission_rejections", "baton_rejections", "code", "reason", _REFUSED, has_engine=False
    ),
    _TOKENS("request_prompt_tokens", "baton_request_prompt_tokens"),
    _TOKENS("request_generation_tokens", "baton_request_generation_tokens"),
    _TOKENS("request_max_num_generation_tokens", "baton_request_longest_choice_tokens"),
    _TOKENS("request_params_max_tokens", "baton_request_max_tokens"),
    _TOKENS("request_prefill_kv_computed_tokens", "baton_request_computed_tokens"),
    VllmSeries("request_params_n", "baton_request_choices", buckets=(1, 2, 5, 10, 20)),
    VllmSeries("request_num_preemptions", "baton_request_preemptions", buckets=_PREEMPTIONS),
    VllmSeries("time_to_first_token_seconds", _FIRST, buckets=FIRST_TOKEN_S),
    VllmSeries(
        "inter_token_latency_seconds", "baton_inter_token_seconds", buckets=BETWEEN_TOKENS_S
    ),
    VllmSeries("request_time_per_output_token_seconds", _PER_TOKEN, buckets=BETWEEN_TOKENS_S),
    VllmSeries("time_per_output_token_seconds", _PER_TOKEN, buckets=BETWEEN_TOKENS_S),
    _LATENCY_OF("e2e_request_latency_seconds", "baton_e2e_seconds"),
    _LATENCY_OF("request_inference_time_seconds", "baton_running_seconds"),
    _PHASE("request_queue_time_seconds", values={"": ("queue",)}),
    _PHASE("request_prefill_time_seconds", values={"": ("prefill",)}),
    _PHASE("request_decode_time_seconds", values={"": ("decode",)}),
)
_FAILED = {"": ("failed",)}
_SLEEP = dict.fromkeys(("awake", "weights_offloaded", "discard_all"), ())
_WORKER = (
    *_load("baton_running_requests", "baton_waiting_requests", "baton_kv_usage_ratio"),
    *_TOKENS_BY_SOURCE,
    VllmSeries("num_preemptions", "baton_preemptions"),
    VllmSeries("iteration_tokens_total", "baton_step_tokens", buckets=_STEP_TOKENS),
    VllmSeries(
        "engine_sleep_state", "baton_worker_asleep", "", "sleep_state", _SLEEP, inverted=True
    ),
    VllmSeries("spec_decode_num_drafts", "baton_spec_drafts"),
    VllmSeries("spec_decode_num_draft_tokens", "baton_spec_draft_tokens"),
    VllmSeries("spec_decode_num_accepted_tokens", "baton_spec_accepted_tokens"),
    VllmSeries("nixl_xfer_time_seconds", "baton_transfer_seconds", buckets=_TRANSFER),
    VllmSeries("nixl_num_failed_transfers", "baton_transfers", "outcome", values=_FAILED),
)
VLLM_SERIES: Mapping[str, tuple[VllmSeries, ...]] = {"router": _ROUTER, "worker": _WORKER}


def finer_bounds(component: str, metric: str) -> tuple[float, ...]:
    """Return the bounds of vLLM's buckets that a histogram of Baton has to distinguish."""
    named = (series.buckets for series in VLLM_SERIES[component] if series.of == metric)
    return tuple(chain.from_iterable(named))
