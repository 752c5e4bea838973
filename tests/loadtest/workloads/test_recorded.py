"""Recorded requests go out as they were, at their times."""

import json

import pytest
from typer.testing import CliRunner

from loadtest.cli import app
from loadtest.results.files import read_results
from loadtest.workloads.replay import is_recorded, recorded_plan
from loadtest.workloads.traces import TraceError
from tests.loadtest.tiny_server import tiny_server

CHAT = {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 2, "top_p": 0.5}
TEXT = {"prompt": "one two three", "max_tokens": 1, "model": "gpt-x"}


def written(folder, *lines: object):
    path = folder / "requests.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def test_bodies_are_sent_as_they_were_recorded(tmp_path):
    lines = [{"timestamp": 9000, "body": TEXT}, {"timestamp": 8000, "body": CHAT}]
    path = written(tmp_path, *lines)
    with tiny_server() as server:
        out = tmp_path / "out"
        command = ["replay", str(path), "--url", server.url, "--out", str(out), "--speed", "10"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        _, chat, text = server.bodies
    sent = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}}
    assert chat == {**CHAT, **sent}
    assert text == {**TEXT, **sent}
    found = read_results(out)
    assert [r.prompt_tokens for r in found.records] == [2, 3]
    assert [r.intended_s for r in found.records] == pytest.approx([0.0, 0.1])


def test_a_trace_of_lengths_is_not_recorded_requests(tmp_path):
    assert not is_recorded(written(tmp_path, {"timestamp": 0, "input_length": 1}))
    assert is_recorded(written(tmp_path, {"timestamp": 0, "body": CHAT}))


@pytest.mark.parametrize(
    ("line", "said"),
    [({"timestamp": 0, "body": {}}, ":2: .*neither messages"), ({"body": CHAT}, ":2: .*timestamp")],
)
def test_a_wrong_line_is_named(tmp_path, line, said):
    with pytest.raises(TraceError, match=said):
        recorded_plan(written(tmp_path, {"timestamp": 0, "body": CHAT}, line))
