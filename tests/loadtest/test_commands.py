"""`baton loadtest …` as it is typed, against a small real server."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from loadtest.cli import app
from loadtest.results.files import read_results
from tests.loadtest.tiny_server import Stream, tiny_server, words

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "loadtest" / "traces" / "mooncake_conversation.jsonl"


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output + result.stderr
    return result


def test_replay_leaves_results_and_report(tmp_path):
    scale = ("--limit", 12, "--speed", 10, "--shrink", 200, "--seed", 3)
    with tiny_server() as server:
        run("replay", SAMPLE, "--url", server.url, "--out", tmp_path, *scale, "--clients", 2)
    found = read_results(tmp_path)
    assert (found.workload, found.seed, found.model) == ("replay", 3, "tiny")
    assert found.summary.ends == {"ok": 12}
    assert found.parameters["shrink"] == 200
    assert [r.prompt_tokens for r in found.records] == [
        r.planned_prompt_tokens for r in found.records
    ]
    assert "<title>Load test: replay on tiny" in (tmp_path / "report.html").read_text()
    probe, *sent = (body["messages"][0]["content"] for body in server.bodies)
    assert probe == "hello"
    assert len({text.split()[0] for text in sent}) == 1  # block 0 is in every request


def test_a_run_on_emulated_workers_says_so_everywhere(tmp_path):
    load = ("--requests", 3, "--rate", 50, "--prompt-tokens", 5, "--answer-tokens", 2)
    with tiny_server() as server:
        server.emulated = "epyc-135m"
        told = run("poisson", "--url", server.url, "--out", tmp_path / "a", *load)
        server.emulated = None
        run("poisson", "--url", server.url, "--out", tmp_path / "b", *load)
    assert "EMULATED WORKERS: no model ran: timing model epyc-135m" in told.output
    assert "epyc-135m" in read_results(tmp_path / "a").server["emulated"]
    assert "Emulated workers." in (tmp_path / "a" / "report.html").read_text()
    assert "Emulated workers." not in (tmp_path / "b" / "report.html").read_text()
    compared = run("compare", tmp_path / "a", tmp_path / "b")
    assert "the loads differ in engine: no model ran: timing model epyc-135m" in compared.output


def test_sessions_are_held_turn_by_turn(tmp_path):
    load = ("--users", 2, "--sessions", 1, "--turns", 2, "--think-s", 0.01, "--tool-calls", 1)
    lengths = ("--prompt-tokens", 5, "--answer-tokens", 2, "--tool-s", 0.01)
    with tiny_server() as server:
        run("sessions", "--url", server.url, "--out", tmp_path, *load, *lengths)
    found = read_results(tmp_path)
    assert found.summary.ends == {"ok": 8}
    assert set(found.summary.by_group) == {"turn 1", "turn 2", "tool"}
    assert sorted(len(body["messages"]) for body in server.bodies[1:]) == [1, 1, 3, 3, 5, 5, 7, 7]


def test_what_a_server_refuses_is_left_out_and_said(tmp_path):
    async def picky(body: dict, stream: Stream) -> None:
        if "ignore_eos" in body:
            await stream.head(400, "application/json")
            await stream.raw(b'{"error": {"message": "unknown field ignore_eos"}}')
            await stream.end()
        else:
            await words(body, stream)

    load = ("--rate", 50, "--requests", 5, "--answer-tokens", 2, "--prompt-tokens", 5)
    with tiny_server(picky) as server:
        said = run("poisson", "--url", server.url, "--out", tmp_path, *load, "--api-key", "s3cret")
    assert "the server rejects ignore_eos" in said.stderr
    assert read_results(tmp_path).summary.ends == {"ok": 5}
    assert "ignore_eos" not in server.bodies[-1]
    assert server.headers[-1]["authorization"] == "bearer s3cret"
    written = (tmp_path / "results.json").read_text() + (tmp_path / "report.html").read_text()
    assert "s3cret" not in written


def test_a_run_in_which_no_request_succeeds_fails(tmp_path):
    async def overloaded(body: dict, stream: Stream) -> None:
        if body["messages"][0]["content"] == "hello":  # the probe
            await words(body, stream)
            return
        await stream.head(503, "application/json")
        await stream.raw(b'{"error": {"message": "overloaded"}}')
        await stream.end()

    load = ("--rate", 50, "--requests", 2, "--answer-tokens", 2, "--prompt-tokens", 5)
    with tiny_server(overloaded) as server:
        said = run("poisson", "--url", server.url, "--out", tmp_path, *load, code=1)
    assert "no request succeeded" in said.stderr
    assert len(read_results(tmp_path).records) == 2


@pytest.mark.slow
def test_search_stops_between_what_meets_and_what_misses(tmp_path):
    gate = {"until_s": 0.0}

    async def one_at_a_time(body: dict, stream: Stream) -> None:
        """A server that can do 25 requests/s."""
        now_s = time.monotonic()
        gate["until_s"] = max(gate["until_s"], now_s) + 0.04
        await asyncio.sleep(gate["until_s"] - now_s)
        await words(body, stream)

    options = ("--slo", "ttft_s=0.25", "--rate", 10, "--requests", 60, "--precision", 0.5)
    with tiny_server(one_at_a_time) as server:
        lengths = ("--prompt-tokens", 5, "--answer-tokens", 1, "--cv", 0)
        said = run("search", "--url", server.url, "--out", tmp_path, *options, *lengths)
    found = read_results(tmp_path)
    met = [point.rate for point in found.search if point.met]
    missed = [point.rate for point in found.search if not point.met]
    assert 10 <= max(met) <= 33
    assert max(met) < min(missed)
    assert found.parameters["rate"] == max(met)
    assert "goodput@90(ttft 0.25 s)" in said.output


def test_compare_two_servers_then_their_files(tmp_path):
    load = ("--rate", 60, "--requests", 8, "--answer-tokens", 2, "--prompt-tokens", 5)
    with tiny_server() as a, tiny_server() as b:
        both = ("--url", a.url, "--url", b.url, "--seeds", 1, "--out", tmp_path)
        said = run("compare", *both, *load)
        # Equal load: the same prompts, seed by seed.
        assert [body["messages"] for body in a.bodies] == [body["messages"] for body in b.bodies]
    assert "ttft_s p50" in said.output
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["a-seed-0", "b-seed-0"]
    said = run("compare", tmp_path / "a-seed-0", tmp_path / "b-seed-0" / "results.json")
    assert "ttft_s p99" in said.output
    assert "the loads differ" not in said.output
    files = (tmp_path / "a-seed-0", tmp_path / "b-seed-0")
    told = json.loads(run("compare", *files, "--json").output)
    assert told["a"] == str(files[0])
    assert any(one["figure"] == "ttft_s p50" and one["b_to_a"] for one in told["figures"])


def test_a_run_never_overwrites_another(tmp_path):
    load = ("--requests", 3, "--rate", 50, "--prompt-tokens", 5, "--answer-tokens", 2)
    with tiny_server() as server:
        run("poisson", "--url", server.url, "--out", tmp_path, *load)
        before = (tmp_path / "results.json").read_bytes()
        calls = len(server.bodies)
        for command in ("poisson", "search"):
            again = (command, "--url", server.url, "--out", tmp_path, *load)
            said = run(*again[:-4], "--requests", 20, code=1)
            told = re.sub(r"\s+", " ", said.stderr)
            assert "has the results of a run: give another --out" in told
        assert len(server.bodies) <= calls + 2, "only the probes of the server"
        assert (tmp_path / "results.json").read_bytes() == before
        (tmp_path / "partial.jsonl").write_text("{}")
        said = run("poisson", "--url", server.url, "--out", tmp_path, *load, code=1)
    assert "continue it with --resume" in re.sub(r"\s+", " ", said.stderr)
    folder = tmp_path / "drills"
    folder.mkdir()
    (folder / "drill.json").write_text("[]")
    said = run("drill", "all", "--out", folder, code=1)
    assert "has the results of drills" in re.sub(r"\s+", " ", said.stderr)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay", "/nowhere", "--out", "x"], "No such file"),
        (["poisson", "--out", "x", "--prompt-tokens", "big"], "is not a distribution"),
        (["poisson", "--out", "x", "--slo", "ttft=1"], "unknown limit"),
        (["poisson", "--out", "x"], "give --url"),
        (["poisson", "--out", "x", "--url", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (["compare", "x"], "give two"),
        (["compare", "x", "y"], "x: No such file"),
        (["drill", "earthquake"], "unknown drill"),
        (["drill", "all"], "no single fleet"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments, said):
    result = run(*arguments, code=1)
    assert said in re.sub(r"\s+", " ", result.stderr)
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_done_and_resume_goes_on(tmp_path):
    with tiny_server() as server:
        command = [sys.executable, "-m", "fleet.cli.main", "loadtest", "poisson"]
        command += ["--url", server.url, "--out", str(tmp_path), "--rate", "20"]
        command += ["--requests", "100", "--answer-tokens", "2"]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        while len(server.bodies) < 30:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
        assert process.returncode == 130
        assert b"interrupted after" in out
        half = read_results(tmp_path)
        assert not half.complete
        assert 20 <= len(half.records) < 100
        done = subprocess.run([*command, "--resume"], env=environment, capture_output=True)
        assert done.returncode == 0, done.stderr
    whole = read_results(tmp_path)
    assert whole.complete
    assert [record.index for record in whole.records] == list(range(100))
    assert whole.records[: len(half.records)] == half.records
    assert json.loads((tmp_path / "results.json").read_text())["version"] == 1
