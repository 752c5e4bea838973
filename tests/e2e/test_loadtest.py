"""A load against a real fleet: its figures are the fleet's own."""

from pathlib import Path

import httpx
from typer.testing import CliRunner

from loadtest.cli import app
from loadtest.results.files import read_results

SAMPLE = Path(__file__).parents[2] / "loadtest" / "traces" / "mooncake_conversation.jsonl"


def test_a_replayed_trace_reports_what_the_fleet_counted(shared, tmp_path):
    scale = ("--limit", "6", "--speed", "20", "--shrink", "64")
    where = ("--url", shared.url, "--out", str(tmp_path), "--header", "x-baton-mode: disaggregated")
    moved = shared.transfers()["count"]
    result = CliRunner().invoke(app, ["replay", str(SAMPLE), *where, *scale])
    assert result.exit_code == 0, result.output + result.stderr
    found = read_results(tmp_path)
    assert found.summary.ends == {"ok": 6}
    for record in found.records:
        assert record.answer_tokens == record.planned_answer_tokens
        assert abs(record.prompt_tokens - record.planned_prompt_tokens) < 60  # the chat template
        assert record.finish_reason == "length"
    sources = found.summary.prefix_tokens_by_source
    assert sum(sources.values()) >= found.summary.prompt_tokens  # the one short probe as well
    assert found.summary.cached_tokens > 0  # all prompts of this trace begin alike
    assert shared.transfers()["count"] > moved
    asked = httpx.get(f"{shared.url}/fleet/requests/{found.records[0].request_id}", timeout=5)
    assert asked.status_code == 200
    shared.assert_baseline()
