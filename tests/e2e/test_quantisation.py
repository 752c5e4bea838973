"""int8 weights and an int8 KV cache through router, prefill, hand-off and decode."""

import pytest
from openai import OpenAI

from tests.e2e.fleet_processes import NAME, fleet
from tests.engine.cpu.integer_kernel import needs_integer_products

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    changes = {"weight_quantisation": "int8", "kv_dtype": "int8"}
    folder = tmp_path_factory.mktemp("q")
    with fleet(folder, "prefill-0", "decode-0", **changes) as running:
        yield running


def ask(running, mode: str, **fields) -> list[str]:
    headers = {"x-baton-mode": mode}
    with OpenAI(base_url=f"{running.url}/v1", api_key="none", default_headers=headers) as client:
        answer = client.chat.completions.create(model=NAME, messages=QUESTION, **fields)
    return [choice.message.content for choice in answer.choices]


@pytest.mark.slow
@needs_integer_products
def test_both_modes_answer_and_agree(quantised):
    for fields in (
        {"temperature": 0},
        {"temperature": 0.9, "seed": 5, "n": 3, "max_tokens": 24},
    ):
        handed_over = ask(quantised, "disaggregated", **fields)
        assert handed_over == ask(quantised, "colocated", **fields)
        assert fields["temperature"] or "Paris" in handed_over[0]
    assert quantised.transfers()["count"] >= 1
    quantised.assert_baseline()
