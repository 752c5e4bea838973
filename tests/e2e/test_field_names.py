"""A real router and workers export the metrics that dashboards and schedulers of others read."""

import pytest

from tests.e2e.conftest import Pages, Pair
from tests.e2e.fleet_processes import NAME
from tests.telemetry import field_names

STATES = field_names.LABEL_VALUES["sleep_state"]


@pytest.fixture(scope="module")
def pages(pair: Pair) -> Pages:
    return pair.pages


def series(pages: Pages) -> dict[str, list[dict[str, str]]]:
    """Labels by the name of a series, over all processes."""
    labels: dict[str, list[dict[str, str]]] = {}
    for page in pages.values():
        for family in page.values():
            for sample in family.samples:
                labels.setdefault(sample.name.removeprefix("vllm:"), []).append(sample.labels)
    return labels


@pytest.mark.parametrize("name", field_names.VLLM)
def test_a_metric_has_the_kind_labels_and_buckets_of_vllm(pages: Pages, name: str) -> None:
    kind, label, bounds = field_names.VLLM[name]
    holders = [page[name] for page in pages.values() if name in page]
    assert holders, "neither the router nor a worker has it"
    for family in holders:
        assert family.type == kind
        labels = {"engine", "model_name", *filter(None, [label])}
        if name in field_names.WITHOUT_ENGINE:
            labels.remove("engine")
        counts = [sample for sample in family.samples if not sample.name.endswith("_bucket")]
        assert {frozenset(sample.labels) for sample in counts} == {frozenset(labels)}
        assert {sample.labels["model_name"] for sample in counts} == {NAME}
        les = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
        assert les == ([*bounds, float("inf")] if bounds else [])
        allowed = field_names.LABEL_VALUES.get(label) or field_names.LABEL_VALUES.get(
            f"{label} of {name}"
        )
        if allowed:
            assert {sample.labels[label] for sample in counts} == allowed


@pytest.mark.parametrize("process", ["router", "prefill", "decode"])
def test_llm_ds_scraper_finds_each_value_in_the_first_series(pages: Pages, process: str) -> None:
    """It takes one series of a family, whichever: there must be one only."""
    for name, labels in field_names.LLM_D.items():
        if name == "lora_requests_info" and process != "router":
            continue  # as at vLLM: without adapters there is none
        (sample,) = pages[process][name].samples
        assert all(label in sample.labels for label in labels), name
        for label in {"block_size", "num_gpu_blocks", "max_lora"} & set(labels):
            assert int(sample.labels[label]) > 0
    blocks = [
        int(pages[name]["cache_config_info"].samples[0].labels["num_gpu_blocks"]) for name in pages
    ]
    assert blocks[0] == sum(blocks[1:])


@pytest.mark.parametrize("reader", ["GRAFANA", "PRODUCTION_STACK", "AIBRIX"])
def test_each_series_that_a_reader_asks_for_is_there(pages: Pages, reader: str) -> None:
    there = series(pages)
    for name in getattr(field_names, reader):
        assert any(labels.get("model_name") == NAME for labels in there.get(name, [])), name


def test_sums_agree(pages: Pages) -> None:
    def value(process: str, name: str, **labels: str) -> float:
        family = next(f for n, f in pages[process].items() if name.startswith(n))
        own = {"engine": "0", "model_name": NAME, **labels}
        [found] = [s.value for s in family.samples if s.name == f"vllm:{name}" and s.labels == own]
        return found

    assert value("router", "request_success_total", finished_reason="length") == 3
    assert value("router", "request_params_n_count") == 3
    assert value("router", "request_params_max_tokens_sum") == 18
    assert value("router", "request_max_num_generation_tokens_sum") == 18
    prompt = value("router", "prompt_tokens_total")
    cached = value("router", "prefix_cache_hits_total")
    assert value("router", "prefix_cache_queries_total") == prompt > 0
    assert value("router", "request_prefill_kv_computed_tokens_sum") == prompt - cached < prompt
    states = {state: value("decode", "engine_sleep_state", sleep_state=state) for state in STATES}
    assert states == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    inference = value("router", "request_inference_time_seconds_sum")
    queue = value("router", "request_queue_time_seconds_sum")
    assert 0 < inference + queue <= value("router", "e2e_request_latency_seconds_sum")
