"""Files of a run, its report, its tables, the comparison of two, and the search for a rate."""

import io
import json
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadtest.client.records import ServerOptions
from loadtest.commands.search import RateSearch
from loadtest.comparison import compare, unlike
from loadtest.metrics.summary import LatencyGoals, summarise
from loadtest.results.files import (
    Journal,
    Results,
    ResultsError,
    SearchPoint,
    read_results,
    write_results,
)
from loadtest.results.report import report, write_report
from loadtest.results.tables import comparison_table, show
from loadtest.run import RunOptions, run_plan
from loadtest.workloads.synthetic import OpenLoop, open_loop_plan
from tests.loadtest.metrics.test_metrics import client, record
from tests.loadtest.tiny_server import tiny_server


def results(**changes: object) -> Results:
    records = [
        record(index=0, group="long", request_id="chatcmpl-1"),
        record(index=1, end="http_error", status=429, detail="queue_full: <script>x", chunk_s=[]),
    ]
    fields = {
        "command": "baton loadtest poisson",
        "created": "2026-11-22T00:00:00+00:00",
        "url": "http://host",
        "model": "tiny",
        "server": {"endpoint": "chat", "prompts": "text"},
        "workload": "poisson",
        "seed": 1,
        "parameters": {"rate": 1.0},
        "planned_requests": 2,
        "complete": True,
        "summary": summarise(records, [client()], slo=LatencyGoals(ttft_s=2.0)),
        "clients": [client()],
        "records": records,
    }
    return Results(**{**fields, **changes})


def test_results_are_read_as_they_were_written(tmp_path):
    write_results(tmp_path, results())
    assert read_results(tmp_path) == read_results(tmp_path / "results.json") == results()


@pytest.mark.parametrize("text", ["", "[]", '{"version": 2}', '{"version": 1}'])
def test_other_files_are_no_results(tmp_path, text):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ResultsError, match=r"results\.json"):
        read_results(tmp_path)


def test_the_report_stands_alone_and_lets_nothing_in(tmp_path):
    page = write_report(tmp_path, results()).read_text(encoding="utf-8")
    assert re.findall(r"""(?:src|href)=["']?(?!data:)""", page) == []
    assert "queue_full: <script>" not in page
    assert "chatcmpl-1" in page
    data = json.loads(re.search(r'id="data" type="application/json">(.*?)</script>', page)[1])
    assert data["latency"][0] == [10.0, 10.0]
    assert data["cdfs"]["ttft_s"][0][-1] == pytest.approx(1.0)
    for formula in ("÷ (output tokens − 1)", "first chunk with text − intended send"):
        assert formula in page


@pytest.mark.parametrize("records", [[], [record(end="connection", chunk_s=[])]])
def test_a_run_without_an_answer_has_a_report_too(records):
    empty = results(records=records, summary=summarise(records, [], slo=LatencyGoals()))
    assert "Load test" in report(empty)
    show(Console(file=io.StringIO()), empty)


def printed(run: Results) -> str:
    out = io.StringIO()
    show(Console(file=out, width=100), run)
    return out.getvalue()


def test_the_table_says_what_happened_and_how_it_was_counted():
    text = printed(results())
    assert "50.0 % of the requests sent were good" in text
    assert "1 × 429 queue_full" in text
    assert "tpot_s = (last chunk − first chunk) ÷ (output tokens − 1)" in text
    assert "the client was the bottleneck: 1 % of requests were sent over 500 ms late" in text
    assert "interrupted after 2 of 9" in printed(results(complete=False, planned_requests=9))


def test_b_beside_a_with_an_interval_over_seeds():
    def scaled(factor: float, seed: int) -> Results:
        records = [record(chunk_s=[10 + factor, 10 + 2 * factor], ended_s=13.0)]
        return results(
            records=records, summary=summarise(records, [], slo=LatencyGoals()), seed=seed
        )

    a = [scaled(factor, seed) for seed, factor in enumerate((1.0, 2.0, 4.0))]
    b = [scaled(1.1 * factor, seed) for seed, factor in enumerate((1.0, 2.0, 4.0))]
    rows = {row[0]: row for row in compare(a, b)}
    _, mean_a, mean_b, ratio = rows["ttft_s p50"]
    assert (mean_a, mean_b) == (pytest.approx(7 / 3), pytest.approx(7.7 / 3))
    # Seeds differ fourfold; quotients seed by seed do not.
    assert ratio.mean == pytest.approx(1.1)
    assert ratio.half_width < 0.01
    out = io.StringIO()
    names = ("https://127.0.0.1:56651", "https://127.0.0.1:56651 x-baton-mode: colocated")
    Console(file=out, width=80).print(comparison_table(compare(a, b), names))
    text = out.getvalue()
    assert "…" not in text and "95 %, 3 seeds" in text
    assert all(f"{side}: {name}" in text for side, name in zip("AB", names, strict=True))
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert [line for line in rows if line.split("│")[1].strip() == ""] == [], "no row is wrapped"


def test_loads_that_differ_are_named():
    assert unlike(results(), results()) == []
    assert unlike(results(), results(seed=2, parameters={"rate": 3.0})) == [
        "seed: 1 and 2",
        "rate: 1.0 and 3.0",
    ]
    longer = results(planned_requests=3, parameters={"rate": 1.0, "requests": 3})
    shorter = results(planned_requests=2, parameters={"rate": 1.0, "requests": 2})
    assert unlike(longer, shorter) == ["requests: 3 and 2"]
    assert unlike(results(), results(planned_requests=3)) == ["planned requests: 2 and 3"]


@given(capacity=st.floats(0.2, 500), first=st.floats(0.1, 100))
def test_the_search_finds_the_knee(capacity, first):
    search = RateSearch(first, precision=0.1, max_points=60)
    while (rate := search.next_rate()) is not None:
        point = {"rate": rate, "met": rate <= capacity, "attainment": 1.0, "good_per_s": rate}
        search.points.append(SearchPoint(**point, client_was_bottleneck=False))
    assert capacity / 1.1 <= search.best.rate <= capacity


def test_a_search_below_everything_ends():
    search = RateSearch(1.0)
    while (rate := search.next_rate()) is not None:
        point = SearchPoint(
            rate=rate, met=False, attainment=0.0, good_per_s=0.0, client_was_bottleneck=False
        )
        search.points.append(point)
    assert search.best is None
    assert 3 < len(search.points) <= 12


def test_a_journal_of_another_run_is_not_gone_on_with(tmp_path):
    journal = Journal(tmp_path, "digest", "server")
    journal.begin([record(index=0)])
    journal.add(record(index=1))
    journal.close(complete=False)
    with (tmp_path / "partial.jsonl").open("ab") as file:
        file.write(b'{"type": "requ')  # a kill -9 in the middle of a line
    assert [r.index for r in Journal(tmp_path, "digest", "server").load()] == [0, 1]
    with pytest.raises(ResultsError, match="another run"):
        Journal(tmp_path, "other", "server").load()
    assert Journal(tmp_path / "new", "digest", "server").load() == []


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    load = OpenLoop(
        requests=30,
        rate=60.0,
        cv=0.0,
        prompt_tokens="4",
        answer_tokens="2",
    )
    plan = open_loop_plan(load, name="p", seed=1)
    with tiny_server() as server:
        options = RunOptions(server=ServerOptions(url=server.url, model="tiny"))
        whole = run_plan(plan, options, folder=tmp_path / "whole")
        journal = Journal(tmp_path / "half", plan.digest(), f"{server.url} tiny")
        journal.begin(whole.records[:20])
        journal.close(complete=False)
        server.bodies.clear()
        resumed = run_plan(plan, options, folder=tmp_path / "half", resume=True)
    assert whole.complete
    assert len(server.bodies) == 10
    assert resumed.complete
    assert [r.index for r in resumed.records] == list(range(30))
    assert resumed.records[:20] == whole.records[:20]
    # The plan's clock goes on: the run has no hole where it was interrupted.
    assert resumed.records[20].intended_s == pytest.approx(0.35)
    assert not (tmp_path / "half" / "partial.jsonl").exists()
    assert msgspec.structs.replace(resumed, complete=False) != resumed
