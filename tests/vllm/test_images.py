"""Images in a fleet of two real vLLM workers (`make test-vllm`) with a small model.

Its weights are random, so its answers are noise; but they are the tokens of vLLM alone, and each
image gives others.
"""

import asyncio
import base64
import contextlib
import io
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from baton.engine.remote.http import HttpOrigin
from tests.fleet.test_up import Served, wait_for
from tests.registry.redis_servers import free_ports
from tests.vllm.places import ARGS, PYTHON, VISION_MODEL
from tests.vllm.test_attached import NEEDED, Server
from tests.vllm.test_fleet import READY_S, Fleet, kill, sockets, vllm_processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fleet,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make test-vllm` makes the environment"),
]
EXPECTED_S = 5.0
(HOST_PORT,) = free_ports(1)
# Otherwise each vLLM computes a pile of images before it starts.
FEW = (*ARGS, "--skip-mm-profiling", "--limit-mm-per-prompt", '{"image": 16}')
CONFIG = f"""
fleet: images
model: {VISION_MODEL}
served_model_name: smol
numerics: fast
max_context_tokens: 2048
port: 0
api_keys:
  key-of-tenant-a: {{tenant: a, log_text: true}}
  key-of-tenant-b: b
  key-of-tenant-operator: {{tenant: operator, role: operator}}
clients: {{images: {{hosts: ["127.0.0.1:{HOST_PORT}"]}}}}
logs: {{format: json, requests: true}}
pools:
  prefill: 0
  decode: 2
  engine: vllm
  vllm: {{python: {PYTHON}, args: {json.dumps(FEW)}}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Fleet]:
    served = Served([sys.executable, "-m", "fleet.cli.main", "up"], folder, CONFIG)
    try:
        fleet = Fleet(served.wait_ready(READY_S))
        assert vllm_processes(folder)
        yield fleet
    finally:
        served.process.terminate()
        served.process.wait(60)
    wait_for(lambda: not vllm_processes(folder), 20)


def picture(seed: int, width: int = 100, height: int = 60) -> str:
    """Return the data URL of an image of noise."""
    noise = random.Random(seed).randbytes(3 * width * height)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), noise).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def question(*urls: str, text: str = "What is it?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*map(part, urls), {"type": "text", "text": text}]}]


def chat(
    fleet: Fleet, messages: list[dict[str, Any]], tenant: str = "a", **more: Any
) -> httpx.Response:
    body = {"model": "smol", "messages": messages, "max_tokens": 8, "temperature": 0}
    with fleet.client(tenant) as client:
        return client.post("/v1/chat/completions", json={**body, "return_token_ids": True, **more})


def alone(fleet: Fleet, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return the answer of one of the vLLMs, without Baton."""
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    body |= {"cache_salt": random.randbytes(16).hex(), **more}
    origin = HttpOrigin.of_socket(next(iter(sockets(fleet).values())))
    raw = origin.fetch("POST", "/v1/chat/completions", 60.0, json.dumps(body).encode())
    answer: dict[str, Any] = json.loads(asyncio.run(raw))
    return answer


def test_the_tokens_are_those_of_vllm_alone(fleet: Fleet) -> None:
    for messages in (
        question(picture(1)),
        question(picture(2), picture(3, 200, 40), picture(4, 20, 20)),
        [
            {"role": "system", "content": "You see."},
            *question(picture(1), text="First?"),
            {"role": "assistant", "content": "A cat."},
            {"role": "user", "content": [{"type": "text", "text": "And this: "}, part(picture(5))]},
        ],
    ):
        own = alone(fleet, messages)
        answer = chat(fleet, messages)
        assert answer.status_code == 200, answer.text
        given = answer.json()
        assert given["prompt_token_ids"] == own["prompt_token_ids"]
        assert given["choices"][0]["token_ids"] == own["choices"][0]["token_ids"]
        assert given["usage"]["prompt_tokens"] == own["usage"]["prompt_tokens"]


def test_an_image_of_a_listed_host_is_the_same_image(fleet: Fleet, tmp_path: Path) -> None:
    url = picture(6)
    (tmp_path / "a.png").write_bytes(base64.b64decode(url.partition(",")[2]))
    command = [sys.executable, "-m", "http.server", str(HOST_PORT), "-b", "127.0.0.1"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as host:
        there = f"http://127.0.0.1:{HOST_PORT}"
        try:
            wait_for(lambda: is_up(there), 20)
            answers = [chat(fleet, question(each)) for each in (url, f"{there}/a.png")]
            missing = chat(fleet, question(f"{there}/b.png"))
        finally:
            host.terminate()
    ids = [answer.json()["prompt_token_ids"] for answer in answers]
    assert ids[0] == ids[1]
    texts = [answer.json()["choices"][0]["token_ids"] for answer in answers]
    assert texts[0] == texts[1]
    assert missing.status_code == 400
    assert "status 404" in missing.json()["error"]["message"]


def is_up(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, trust_env=False).status_code == 200
    return False


def route_of(answer: httpx.Response) -> str:
    return answer.headers["x-baton-route"].partition("; cached")[0]


def cached_of(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_second_turn_finds_the_image_in_the_cache_and_other_images_do_not(fleet: Fleet) -> None:
    """All images have one size, so that their tokens are equal; only their digests differ."""
    fleet.wait_until_all_are_ready()
    urls = [picture(seed, 300, 200) for seed in (101, 102)]
    first = chat(fleet, question(urls[0], urls[1]))
    tokens = first.json()["usage"]["prompt_tokens"]
    assert cached_of(first) == 0
    assert tokens > 190
    for text in ("What is it?", "And now?", "Or now?"):
        wait_for(fleet.is_at_rest, 30)
        again = chat(fleet, question(urls[0], urls[1], text=text))
        if route_of(again) == route_of(first):  # another worker may be cheaper on a busy host
            assert cached_of(again) >= (tokens - 32) // 32 * 32 - 32
            break
    else:
        pytest.fail("three times at another worker")
    wait_for(fleet.is_at_rest, 30)
    swapped = chat(fleet, question(urls[1], urls[0]))
    assert cached_of(swapped) == 0
    assert cached_of(chat(fleet, question(urls[0], urls[1]), "b")) == 0
    both = {tuple(one.json()["choices"][0]["token_ids"]) for one in (first, swapped)}
    assert len(both) == 2


def test_the_router_knows_which_worker_has_an_image(fleet: Fleet) -> None:
    """KV events name the image, and the router's index has the blocks behind it."""
    fleet.wait_until_all_are_ready()
    for seed in (200, 201):
        messages = question(picture(seed, 200, 300))
        first = chat(fleet, messages)
        holder = route_of(first).partition("decode=")[2].partition(";")[0]
        assert first.json()["usage"]["prompt_tokens"] > 100
        time.sleep(EXPECTED_S)  # the index forgets what it only expects

        again = chat(fleet, messages)
        with fleet.client("operator") as client:
            report = client.get(f"/fleet/requests/{again.json()['id']}").json()
        events = [event["event"] for event in report["timeline"]]
        assert any("the prompt has images" in event for event in events)
        uncached = {one["decode"]: one["uncached_tokens"] for one in report["candidates"]}
        assert uncached[holder] < 64  # another worker may be cheaper on a busy host


def test_all_apis_take_images_in_any_turn_and_in_results_of_tools(fleet: Fleet) -> None:
    url = picture(7)
    with fleet.client() as client:
        answer = client.post(
            "/v1/responses",
            json={
                "model": "smol",
                "max_output_tokens": 8,
                "temperature": 0,
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_image", "image_url": url},
                            {"type": "input_text", "text": "What is it?"},
                        ],
                    }
                ],
            },
        )
        own = alone(fleet, question(url))
        assert answer.status_code == 200, answer.text
        text = own["choices"][0]["message"]["content"]
        assert answer.json()["output"][0]["content"][0]["text"] == text
        assert answer.json()["usage"]["input_tokens"] == own["usage"]["prompt_tokens"]
        stored = client.post(
            "/v1/responses",
            json={
                "model": "smol",
                "input": "And now?",
                "max_output_tokens": 4,
                "previous_response_id": answer.json()["id"],
            },
        )
        assert stored.json()["usage"]["input_tokens"] > own["usage"]["prompt_tokens"]
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        image = {"type": "image", "source": source}
        answer = client.post(
            "/v1/messages",
            json={
                "model": "smol",
                "max_tokens": 8,
                "temperature": 0,
                "messages": [
                    {"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}
                ],
            },
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["content"][0]["text"] == text
        tool = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}
        body = {
            "model": "smol",
            "max_tokens": 4,
            "tools": [tool],
            "messages": [
                {"role": "user", "content": "Look!"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}],
                },
                {"role": "user", "content": [result]},
            ],
        }
        answer = client.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        counted = client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
        usage = answer.json()["usage"]
        cached = usage.get("cache_read_input_tokens") or 0
        assert counted == usage["input_tokens"] + cached
        result["content"] = "nothing"
        without = client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
        assert counted > without + 80
        body = {"model": "smol", "messages": question(url)}
        rendered = client.post("/v1/chat/completions/render", json=body)
        assert rendered.status_code == 400  # tokens alone are not the prompt


def test_what_is_no_image_is_refused_by_the_name_of_its_part(fleet: Fleet) -> None:
    text = {"type": "text", "text": "What is it?"}
    file = base64.b64decode(picture(1).partition(",")[2])
    bad = {
        "https://example.com/a.png": "fleet file",
        "data:image/png;base64,": "is no PNG",
        "data:image/png;base64,AAAA": "is no PNG",
        "data:image/png;base64,!!!!": "no valid base64",
        "data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(): "is no PNG",
        "data:image/png;base64," + base64.b64encode(file[:-200]).decode(): "damaged",
    }
    for url, why in bad.items():
        messages = [*question(picture(1)), {"role": "user", "content": [text, part(url)]}]
        answer = chat(fleet, messages)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "messages[1].content[1]"
        assert why in answer.json()["error"]["message"]
    with fleet.client() as client:
        image = {"type": "image", "source": {"type": "base64", "data": "AAAA"}}
        told = [{"role": "user", "content": [text, text, image]}]
        body = {"model": "smol", "max_tokens": 4, "messages": told}
        answer = client.post("/v1/messages", json=body)
        assert answer.status_code == 400, answer.text
        assert "messages[0].content[2]" in answer.json()["error"]["message"]
    many = chat(fleet, question(*[picture(1)] * 17))
    assert many.status_code == 400
    assert many.json()["error"]["param"] == "messages[0].content[16]"
    file = io.BytesIO()
    Image.new("RGB", (4000, 3000)).save(file, "PNG")  # 12 million pixels in 35 KB
    large = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    many = chat(fleet, question(*[large] * 3))
    assert many.status_code == 400
    assert many.json()["error"]["param"] == "messages[0].content[2]"
    written = chat(fleet, question(picture(1), text="Is it <image> or not?"))
    assert written.status_code == 400
    assert "placeholder" in written.json()["error"]["message"]


def test_a_batch_takes_images_and_its_output_has_none(fleet: Fleet) -> None:
    body = {"model": "smol", "messages": question(picture(31)), "max_tokens": 4}
    bad = {**body, "messages": question("data:image/png;base64,AAAA")}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": sent}
        for name, sent in (("good", body), ("bad", bad))
    ]
    file = "\n".join(map(json.dumps, lines)).encode()
    own = alone(fleet, question(picture(31)))
    with fleet.client() as client:
        files = {"file": ("lines.jsonl", file)}
        uploaded = client.post("/v1/files", files=files, data={"purpose": "batch"}).json()
        asked = {
            "input_file_id": uploaded["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        batch = client.post("/v1/batches", json=asked).json()
        path = f"/v1/batches/{batch['id']}"
        wait_for(lambda: client.get(path).json()["status"] == "completed", 60)
        done = client.get(path).json()
        output = client.get(f"/v1/files/{done['output_file_id']}/content").text
        errors = client.get(f"/v1/files/{done['error_file_id']}/content").text
    usage = json.loads(output)["response"]["body"]["usage"]
    assert usage["prompt_tokens"] == own["usage"]["prompt_tokens"]
    assert "messages[0].content[0]" in errors
    assert "base64," not in output + errors


def test_neither_logs_nor_state_hold_an_image(fleet: Fleet, folder: Path) -> None:
    """Behind all requests of this module but one; uploaded files are the client's own."""
    needle = picture(1).partition(",")[2][2000:2100].encode()
    read = 0
    for path in folder.rglob("*"):
        if path.is_file() and "batch" not in str(path) and "files" not in path.parts:
            read += 1
            assert needle not in path.read_bytes(), path
    assert read > 3


def test_a_stream_with_an_image_goes_on_elsewhere(fleet: Fleet) -> None:
    fleet.wait_until_all_are_ready()
    body = {"model": "smol", "messages": question(picture(9)), "max_tokens": 60, "stream": True}
    body |= {"ignore_eos": True, "temperature": 0, "return_token_ids": True}
    tokens: list[int] = []
    killed = ""
    with fleet.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as one:
        worker = one.headers["x-baton-route"].partition("decode=")[2].partition(";")[0]
        for line in one.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                tokens += choice.get("token_ids") or []
            if len(tokens) >= 10 and not killed:
                killed = worker
                kill(fleet, worker, "server")
    assert len(tokens) == 60
    own = alone(fleet, question(picture(9)), max_tokens=60, ignore_eos=True)
    same = [a == b for a, b in zip(tokens, own["choices"][0]["token_ids"], strict=True)]
    assert all(same[:10])
    fleet.wait_until_all_are_ready()


def test_attached_servers_take_images(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    server = Server(tmp_path, port, *NEEDED, model=VISION_MODEL)
    config = f"""
fleet: attached-images
model: {VISION_MODEL}
served_model_name: smol
numerics: fast
max_context_tokens: 2048
port: 0
pools: {{engine: vllm, vllm: {{servers: ["{server.url}"]}}}}
"""
    try:
        wait_for(server.is_healthy, READY_S)
        served = Served([sys.executable, "-m", "fleet.cli.main", "up"], tmp_path, config)
        try:
            attached = Fleet(served.wait_ready(30))
            messages = question(picture(1), picture(2, 200, 200))
            first = chat(attached, messages)
            again = chat(attached, messages)
            other = chat(attached, question(picture(2), picture(1, 200, 200)))
        finally:
            served.process.terminate()
            served.process.wait(60)
        body = {"model": "smol", "messages": messages, "max_tokens": 8, "temperature": 0}
        url = f"{server.url}/v1/chat/completions"
        own = httpx.post(url, json={**body, "return_token_ids": True}, timeout=60, trust_env=False)
        assert first.json()["prompt_token_ids"] == own.json()["prompt_token_ids"]
        tokens = own.json()["choices"][0]["token_ids"]
        assert first.json()["choices"][0]["token_ids"] == tokens
        assert (cached_of(first), cached_of(other)) == (0, 0)
        assert cached_of(again) > 100
    finally:
        server.kill()
