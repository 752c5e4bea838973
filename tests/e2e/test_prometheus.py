"""A real Prometheus beside a real fleet: targets, names, sums, every query of every dashboard."""

import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from deploy.grafana.dashboard_panels import PRICE
from deploy.grafana.dashboards import DEFAULT_PRICE, FOLDER
from tests.e2e.fleet_processes import NAME, OPS, Fleet, chat, slowed
from tests.e2e.prometheus_server import PROGRAM, SCRAPE_S, Prometheus, prometheus_of, until
from tests.telemetry import field_names

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no Prometheus here: apt-get install prometheus"
)
WINDOW = "30s"
DASHBOARDS = sorted(path.stem for path in FOLDER.glob("*.json"))
# Nothing was pulled out of the fleet in these tests, so nothing was released late.
MAY_BE_NAN = ("Time from cancel to release at the worker",)


@pytest.fixture(scope="module")
def prometheus(shared: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with prometheus_of(shared.url, tmp_path_factory.mktemp("prometheus")) as server:
        yield server


@pytest.fixture(scope="module")
def load(shared: Fleet, prometheus: Prometheus) -> None:
    """Requests of every kind between two scrapes: both modes, a prefix hit, one that leaves."""
    until(lambda: len(prometheus.targets()) == 4)
    until(lambda: all(target["health"] == "up" for target in prometheus.targets()))
    limits = {"x-baton-slo-ttft-ms": "60000", "x-baton-slo-itl-ms": "10000"}
    with httpx.Client(base_url=shared.url, timeout=60) as client:
        first = client.post("/v1/chat/completions", json=chat("Hi.", max_tokens=8), headers=limits)
        assert first.status_code == 200, first.text
        time.sleep(2 * SCRAPE_S)  # a rate needs the value before
        for number in range(6):
            mode = ("disaggregated", "colocated", "disaggregated")[number % 3]
            answer = client.post(
                "/v1/chat/completions",
                json=chat(f"Say {number % 2} and more " + "and more " * 40, max_tokens=8),
                headers={"x-baton-mode": mode, **limits},
            )
            assert answer.status_code == 200, answer.text
        for tenant, rates in {"default": {"tpm": 1_000_000_000}, "narrow": {"rpm": 1}}.items():
            limited = client.put(f"/fleet/tenants/{tenant}", json=rates, headers=OPS)
            assert limited.status_code == 200, limited.text
        narrow = {"x-baton-tenant": "narrow"}
        ends = [client.post("/v1/chat/completions", json=chat("Hi."), headers=narrow) for _ in "12"]
        assert [end.status_code for end in ends] == [200, 429]
        refused = client.post("/v1/completions", json={"prompt": []})
        assert refused.status_code == 400
        long = chat("Leave me.", max_tokens=200, stream=True)
        with client.stream("POST", "/v1/chat/completions", json=long) as leaving:
            next(leaving.iter_lines())
    ended = "sum(baton_e2e_seconds_count)"
    until(lambda: prometheus.query(ended) and prometheus.value(ended) >= 7)
    time.sleep(2 * SCRAPE_S)


def test_every_process_is_found_and_answers(shared: Fleet, prometheus: Prometheus, load) -> None:
    told = {target["labels"].get("worker", "router"): target for target in prometheus.targets()}
    assert sorted(told) == ["decode-0", "prefill-0", "prefill-1", "router"]
    assert {target["labels"]["fleet"] for target in told.values()} == {"e2e"}
    assert told["prefill-1"]["labels"]["role"] == "prefill"
    assert prometheus.value("sum(up)") == 4
    assert prometheus.value("max(scrape_samples_post_metric_relabeling)") < 5000


def test_labels_are_bounded(prometheus: Prometheus, load) -> None:
    """No metric grows with requests: the largest has few series after all of them."""
    [largest] = prometheus.query(
        'topk(1, count by (__name__) ({__name__=~"baton_.*", job="baton"}))'
    )
    assert float(largest["value"][1]) < 1000, largest
    assert prometheus.value("sum(baton_label_overflows_total or vector(0))") == 0


def test_sums_add_up_after_load_and_a_cancellation(prometheus: Prometheus, load) -> None:
    phases, e2e = (prometheus.value(f"sum({name}_seconds_sum)") for name in PHASES_AND_E2E)
    assert phases == pytest.approx(e2e, rel=0.02)
    prompt = prometheus.value("sum(baton_prompt_tokens_total)")
    by_source = prometheus.value('sum(baton_prefix_tokens_total{component="router"})')
    assert by_source == prompt > 0
    assert prometheus.value("sum(baton_request_prompt_tokens_sum)") == prompt
    generated = prometheus.value("sum(baton_generation_tokens_total)")
    assert prometheus.value("sum(baton_request_generation_tokens_sum)") == generated
    assert prometheus.value("sum(baton_cancellations_total)") >= 1
    for worker in prometheus.query('baton_kv_blocks{state="total"}'):
        name, total = worker["metric"]["worker"], float(worker["value"][1])
        parts = f'sum(baton_kv_blocks{{worker="{name}", state!="total"}})'
        assert prometheus.value(parts) == total
    sent = prometheus.value('sum(baton_transfer_bytes_total{direction="sent"})')
    received = prometheus.value('sum(baton_transfer_bytes_total{direction="received"})')
    assert sent >= received > 0


PHASES_AND_E2E = ("baton_phase", "baton_e2e")


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_query_of_a_dashboard_returns_data(prometheus: Prometheus, load, name: str) -> None:
    document = json.loads(Path(FOLDER / f"{name}.json").read_text())
    asked = 0
    for panel in document["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", WINDOW)
            expression = expression.replace("$fleet", "e2e").replace(f"${PRICE}", DEFAULT_PRICE)
            assert "$" not in expression
            found = [float(one["value"][1]) for one in prometheus.query(expression)]
            assert found, (panel["title"], expression)
            numbers = [value for value in found if math.isfinite(value)]
            assert numbers or panel["title"] in MAY_BE_NAN, (panel["title"], expression, found)
            asked += 1
    assert asked > 4


@pytest.mark.parametrize("query", field_names.QUERIES)
def test_queries_of_other_dashboards_and_of_keda_return_data(
    prometheus: Prometheus, load: None, query: str
) -> None:
    found = prometheus.query(query.replace("$", NAME))
    assert any(math.isfinite(float(one["value"][1])) for one in found), found


def test_sums_over_all_pages_count_nothing_twice(
    shared: Fleet, prometheus: Prometheus, load
) -> None:
    """Workers and routers have pages, and both have series of vLLM."""
    asked = prometheus.value("sum(vllm:prefix_cache_queries_total)")
    assert asked == prometheus.value("sum(baton_prompt_tokens_total)") > 0
    assert prometheus.value("sum(vllm:prompt_tokens_by_source_total)") == asked
    running = "sum(vllm:num_requests_running)"
    until(lambda: prometheus.value(running) == 0)
    body = chat("Count.", max_tokens=900, stream=True, ignore_eos=True)
    with httpx.stream("POST", f"{shared.url}/v1/chat/completions", json=body, timeout=60) as stream:
        assert stream.status_code == 200, stream.read()
        until(lambda: prometheus.value(running) > 0, 10)
        assert prometheus.value(running) == 1


@pytest.mark.slow
def test_a_planted_slow_prefill_worker_is_found_in_three_ways(
    shared: Fleet, prometheus: Prometheus, load: None
) -> None:
    """By the explanation of its requests, by what the page marks, by the dashboards' query."""
    slow, answers = "prefill-1", []
    began_s = time.monotonic()
    with slowed(shared.workers[slow].record.pid):
        with (
            httpx.Client(base_url=shared.url, timeout=120) as client,
            ThreadPoolExecutor(2) as pool,
        ):

            def ask(number: int) -> str:
                answer = client.post(
                    "/v1/chat/completions",
                    json=chat(f"{number} " * 120 + "and then?", max_tokens=2),
                    headers={"x-baton-mode": "disaggregated"},
                )
                assert answer.status_code == 200, answer.text
                return answer.headers["x-request-id"]

            answers = list(pool.map(ask, range(100, 112)))
            stories = [client.get(f"/fleet/requests/{name}").json() for name in answers]
            rates = client.get("/fleet/series").json()["workers"]
        served = [story for story in stories if story["route"]["prefill"] == slow]
        others = [story for story in stories if story["route"]["prefill"] != slow]
        assert served
        assert others
        named = [story for story in served if story["why"]["cause"] == "slow_prefill_worker"]
        assert named, [story["why"] for story in served]
        assert all(slow in story["why"]["sentence"] for story in named)
        blamed = [story for story in others if story["why"]["cause"] == "slow_prefill_worker"]
        assert blamed == [], "its peer is not blamed"
        speed = {name: rates[name]["prefill_tokens_per_s"] for name in ("prefill-0", slow)}
        assert speed[slow] < 0.5 * speed["prefill-0"], "what the page marks"
        time.sleep(2 * SCRAPE_S)
        latency = json.loads((FOLDER / "latency.json").read_text())
        [panel] = [p for p in latency["panels"] if "prefill time" in p["title"]]
        expression = panel["targets"][0]["expr"].replace("$fleet", "e2e")
        found = prometheus.query(expression.replace("$__rate_interval", "2m"))
        shown = {one["metric"]["worker"]: float(one["value"][1]) for one in found}
        assert shown[slow] < 0.5 * shown["prefill-0"], shown
    assert time.monotonic() - began_s < 60, "within a minute"


def test_the_rules_record_and_no_alert_of_a_sick_fleet_fires(prometheus, load) -> None:
    until(lambda: prometheus.query("baton:prefill_tokens_per_busy_second"), 15)
    workers = prometheus.query("baton:prefill_tokens_per_busy_second")
    assert all(float(one["value"][1]) > 0 for one in workers)
    firing = {one["metric"]["alertname"] for one in prometheus.query('ALERTS{alertstate="firing"}')}
    assert firing == set()
