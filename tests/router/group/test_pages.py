"""Answers of several routers, put together."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from baton.telemetry.live_series import LiveSeries
from baton.telemetry.metrics import Metrics
from router.frontend.group.pages import Pages
from router.frontend.group.past_pages import PastPages
from router.frontend.group.together import latest_of, load_of, series_of


def page(requests: int, waiting: int, workers: int, connected: int = 1) -> tuple[Metrics, bytes]:
    metrics = Metrics("router", model="m")
    for _ in range(requests):
        metrics.inc("baton_requests", endpoint="chat", status="200", tenant="a\\nb")
        metrics.observe("baton_inter_token_seconds", 0.02)
    metrics.set("baton_queue_requests", waiting, tenant="all")
    metrics.set("baton_workers", workers, role="decode", state="ready")
    metrics.set("baton_registry_connected", connected)
    return metrics, metrics.render()


def values(page: bytes) -> dict[str, float]:
    families = text_string_to_metric_families(page.decode())
    return {
        sample.name + "".join(f" {v}" for k, v in sorted(sample.labels.items()) if k != "tenant"): (
            sample.value
        )
        for family in families
        for sample in family.samples
    }


def test_counters_and_histograms_add_up_and_gauges_are_what_they_say():
    metrics, first = page(3, 2, 4)
    _, second = page(5, 1, 4, connected=0)
    both = Pages(metrics.together)
    both.add(first)
    both.add(second)
    found = values(both.render())
    assert found["baton_requests_total chat 200"] == 8
    assert found["baton_inter_token_seconds_count"] == 8
    assert found["baton_inter_token_seconds_bucket 0.02"] == 8
    assert found["vllm:inter_token_latency_seconds_count 0 m"] == 8
    assert found["baton_queue_requests"] == 3
    assert found["baton_workers decode ready"] == 4
    assert found["baton_registry_connected"] == 0
    assert found.keys() == values(first).keys()


def test_one_page_stays_as_it_is():
    metrics, first = page(3, 2, 4)
    alone = Pages(metrics.together)
    alone.add(first)
    assert alone.render() == first


def test_what_a_life_counted_goes_on_counting(tmp_path: Path):
    """Its gauges do not; lives of its place become one page, and no other's are touched."""
    metrics, first = page(3, 2, 4)
    gone = 2**22 + 1  # above any pid
    for name in (f"1-{gone}.page", f"1-{gone + 1}.page", f"0-{gone}.page"):
        (tmp_path / name).write_bytes(first)
    past = PastPages(tmp_path, 1, metrics.together)
    past.sum_up()
    past.sum_up()
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"0-{gone}.page", "1-0.page"]
    _, second = page(1, 1, 4)
    past.keep(second)
    both = Pages(metrics.together)
    both.add(second)
    for missing in past.missing(set()):
        both.add(missing, past=True)
    found = values(both.render())
    assert found["baton_requests_total chat 200"] == 10
    assert found["baton_queue_requests"] == 1
    assert len(past.missing({gone})) == 1


def test_load_and_latest_requests():
    parts = [{"server_load": 2}, {"server_load": 3}]
    assert load_of(parts, {}) == {"server_load": 5}
    lists = [
        {
            "at_s": 50.0,
            "requests": [
                {"id": "a", "age_s": 1, "elapsed_s": 9},
                {"id": "b", "age_s": 4, "elapsed_s": 1},
            ],
        },
        # It was slow to answer: what looks older came later than b.
        {"at_s": 53.0, "requests": [{"id": "c", "age_s": 5, "elapsed_s": 5}]},
    ]
    newest = latest_of(lists, {})
    assert newest["at_s"] == 53.0
    assert [(r["id"], r["age_s"]) for r in newest["requests"]] == [("a", 4), ("c", 5), ("b", 7)]
    slowest = latest_of(lists, {"order": "slowest", "limit": "2"})["requests"]
    assert [r["id"] for r in slowest] == ["a", "c"]


def test_a_second_is_told_when_all_have_closed_it():
    parts = []
    for tokens, seconds in ((3, 3), (5, 2)):
        series = LiveSeries()
        for second in range(seconds):
            series.tokens(0.01 * tokens, tokens)
            series.handed_over("p", "d")
            series.ended_with_limits("good" if tokens == 3 else "late")
            ended_s = 100.0 + second + tokens / 100
            sizes = {"prefill": 1, "decode": 3}
            series.close(ended_s, queued=1, running=2, last_turn=tokens, sizes=sizes)
        samples = [sample.as_dict() for sample in series.after(0)]
        parts.append({"last": series.last, "samples": samples, "workers": {"w": {}}})
    told = series_of(parts, {})
    assert (told["last"], [sample["number"] for sample in told["samples"]]) == (101, [100, 101])
    sample = told["samples"][1]
    assert (sample["generated_tokens"], sample["queued"], sample["running"]) == (8, 2, 4)
    assert sample["handoffs"] == {"p>d": 2}
    assert (sample["limited"], sample["last_turn"]) == ({"good": 1, "late": 1}, 5)
    assert sample["sizes"] == {"prefill": 1, "decode": 3}, "each router sees all workers"
    assert 0.03 < sample["itl_p50_s"] < sample["itl_p99_s"] == 0.05
    assert told["workers"] == {"w": {}}
