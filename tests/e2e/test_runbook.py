"""Each symptom of docs/guide/troubleshooting.md, planted, and found as the page says."""

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from loadtest.cli import app
from loadtest.results.files import read_results
from tests.e2e.fleet_processes import NAME, Fleet, chat, fleet, slowed

pytestmark = pytest.mark.slow

BLOCKS = 128


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(tmp_path_factory.mktemp("f"), "prefill-0", "decode-0", kv_blocks=BLOCKS) as made:
        yield made


class Client:
    """Asks a router, and reads what an operator would."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=170)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, text: str, mode: str = "disaggregated", tenant: str = "a", **more: Any) -> Any:
        headers = {"x-baton-mode": mode, "x-baton-tenant": tenant}
        body = chat(text, **{"max_tokens": 8, **more})
        answer = self._http.post("/v1/chat/completions", json=body, headers=headers)
        return answer.status_code, answer.headers.get("x-request-id", ""), answer.json()

    def ask_together(self, texts: list[str], **more: Any) -> list[Any]:
        with ThreadPoolExecutor(len(texts)) as pool:
            return list(pool.map(lambda text: self.ask(text, **more), texts))

    def story(self, request_id: str) -> Any:
        return self._http.get(f"/fleet/requests/{request_id}").json()

    def slowest(self) -> list[Any]:
        found = self._http.get("/fleet/requests", params={"order": "slowest", "limit": 50})
        return found.json()["requests"]

    def get(self, path: str) -> Any:
        return self._http.get(path).json()


@pytest.fixture
def client(running: Fleet) -> Iterator[Client]:
    running.assert_baseline()
    with Client(running.url) as made:
        yield made


def metric(running: Fleet, name: str) -> float:
    """Of all workers together."""
    total = 0.0
    for worker in running.workers.values():
        page = httpx.get(f"http://{worker.record.metrics_address}/metrics", timeout=10).text
        lines = [line for line in page.splitlines() if line.split("{")[0].split(" ")[0] == name]
        total += sum(float(line.rsplit(" ", 1)[1]) for line in lines)
    return total


def texts_of(answers: list[Any]) -> set[str]:
    assert {status for status, _, _ in answers} == {200}
    return {body["choices"][0]["message"]["content"] for _, _, body in answers}


def test_wrong_output_the_same_on_every_path_is_the_model_s(running: Fleet, client: Client) -> None:
    before = metric(running, "baton_chunks_refused_total")
    modes = ("disaggregated", "colocated", "auto")
    answers = [client.ask("Name a colour of the sky.", mode) for mode in modes]
    assert len(texts_of(answers)) == 1
    assert metric(running, "baton_chunks_refused_total") == before


def test_a_high_ttft_has_a_sentence(client: Client) -> None:
    texts = [f"{number} " * 250 for number in range(100, 106)]
    answers = client.ask_together(texts, max_tokens=1)
    texts_of(answers)
    causes = {client.story(name)["why"]["cause"] for _, name, _ in answers}
    assert causes & {"queued", "worker_queue", "long_prompt"}, causes
    assert client.slowest()[0]["first_token_s"] > 0


def test_slow_streams_name_the_decode_worker(running: Fleet, client: Client) -> None:
    with slowed(running.workers["decode-0"].record.pid):
        _, name, _ = client.ask("Tell a story of a fox.", max_tokens=40)
    story = client.story(name)
    assert story["why"]["cause"] in ("slow_decode", "stalled"), story["why"]
    assert story["longest_gaps"][0]["gap_s"] > 0.1
    assert story["phases_s"]["decode"] > story["phases_s"]["prefill"]


def test_a_burst_beyond_the_pool_preempts_and_fails_nobody(running: Fleet, client: Client) -> None:
    before = metric(running, "baton_preemptions_total")
    # 29 blocks each: six or more are at one of the two workers, which has room for four.
    texts = [f"Story {number}: {'and then ' * 60}" for number in range(12)]
    answers = client.ask_together(texts, max_tokens=300, mode="colocated", ignore_eos=True)
    texts_of(answers)
    assert metric(running, "baton_preemptions_total") > before
    stories = [client.story(name) for _, name, _ in answers]
    assert sum(story["worker_times_s"]["preemptions"] for story in stories) > 0
    status, _, body = client.ask("word " * (BLOCKS * 16), mode="colocated")
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")


def _burn(_: int) -> None:
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        pass


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Processes that take the cores."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_burn, args=(0,)) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_busy_but_slow_shows_in_the_steps_and_not_in_the_queue(client: Client) -> None:
    def step_s() -> float:
        for _ in range(2):
            client.ask("Count to fifty.", max_tokens=60, ignore_eos=True)
        return float(client.get("/fleet/series")["workers"]["decode-0"]["decode_step_s"])

    alone_s = step_s()
    with neighbours(6):
        beside_s = step_s()
    assert beside_s > 1.3 * alone_s, (alone_s, beside_s)


def test_a_queue_before_idle_workers_is_a_window_that_is_too_small(running: Fleet) -> None:
    file = running.folder / "fleet.yaml"
    kept = file.read_text()
    file.write_text(f"{kept}max_batch_requests: 1\nmax_step_tokens: 64\n")
    try:
        url = running.start_router()
    finally:
        file.write_text(kept)
    texts = [f"Count to {number}." for number in range(4)]
    with Client(url) as client:
        answers = client.ask_together(texts, max_tokens=30, ignore_eos=True)
        texts_of(answers)
        causes = [client.story(name)["why"]["cause"] for _, name, _ in answers]
        workers = client.get("/fleet")["workers"]
    assert "queued" in causes, causes
    most = max(worker["kv_blocks"]["leased"] for worker in workers)
    assert most < BLOCKS // 2, "the workers had room all the time"


def test_no_prefix_gain_between_tenants_or_behind_a_changed_beginning(client: Client) -> None:
    prompt = "You are a helpful clerk of a large library. " * 12

    def cached(text: str, tenant: str) -> int:
        _, _, body = client.ask(text, tenant=tenant, max_tokens=2)
        return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached(f"{prompt} One?", "first")
    assert cached(f"{prompt} Two?", "first") >= 64
    assert cached(f"{prompt} Two?", "second") < 64, "tenants share nothing unless told to"
    assert cached(f"On Monday: {prompt} Two?", "first") < 64


def test_an_upgrade_is_judged_by_two_results(
    running: Fleet, client: Client, tmp_path: Path
) -> None:
    def load(folder: Path) -> None:
        lengths = ("--prompt-tokens", "40", "--answer-tokens", "24", "--requests", "8")
        where = ("--url", running.url, "--model", NAME, "--out", str(folder))
        # Else the router sends past the slow worker what it can: all, on a busy machine.
        through = ("--header", "x-baton-mode: disaggregated")
        result = CliRunner().invoke(app, ["poisson", *where, *lengths, "--rate", "2", *through])
        assert result.exit_code == 0, result.output + result.stderr

    load(tmp_path / "before")
    with slowed(running.workers["decode-0"].record.pid):
        load(tmp_path / "after")
    compared = CliRunner().invoke(
        app, ["compare", str(tmp_path / "before"), str(tmp_path / "after")]
    )
    assert compared.exit_code == 0, compared.output + compared.stderr
    assert "tpot_s" in compared.output
    runs = [read_results(tmp_path / name) for name in ("before", "after")]
    tpot = [run.summary.distributions["tpot_s"] for run in runs]
    assert tpot[1].p50 > 1.5 * tpot[0].p50, "what the quotients tell was really so"
