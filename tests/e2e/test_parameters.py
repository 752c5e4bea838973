"""Every parameter acts, through router, prefill, hand-off and decode, with the official client."""

import math
import time

import httpx
import pytest

from tests.e2e.fleet_processes import NAME

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TALE = "Once upon a time there was a"


def complete(client, prompt=TALE, **fields):
    extra = {
        key: fields.pop(key)
        for key in (
            "top_k",
            "min_p",
            "repetition_penalty",
            "ignore_eos",
            "min_tokens",
            "stop_token_ids",
            "priority",
            "cache_salt",
            "guided_json",
            "guided_regex",
            "guided_grammar",
        )
        if key in fields
    }
    fields = {"model": NAME, "max_tokens": 12, "temperature": 0, **fields}
    return client.completions.create(prompt=prompt, extra_body=extra, **fields)


def test_streamed_and_whole_are_the_same(client):
    whole = client.chat.completions.create(model=NAME, messages=QUESTION, temperature=0)
    stream = client.chat.completions.create(
        model=NAME,
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_multi_turn_and_text_parts(client):
    messages = [
        {"role": "system", "content": "You answer with one word."},
        {"role": "user", "content": [{"type": "text", "text": "Capital of Italy?"}]},
        {"role": "assistant", "content": "Rome"},
        {"role": "user", "content": "And of France?"},
    ]
    answer = client.chat.completions.create(
        model=NAME, messages=messages, temperature=0, max_completion_tokens=10
    )
    assert "Paris" in answer.choices[0].message.content


def test_prompts_as_text_list_and_ids(client):
    ids = httpx.post(
        f"{client.base_url}".removesuffix("v1/") + "tokenize",
        json={"model": NAME, "prompt": TALE},
        timeout=10,
    ).json()["tokens"]
    one = complete(client).choices[0].text
    both = complete(client, prompt=[TALE, "The sea is"])
    assert [c.index for c in both.choices] == [0, 1]
    assert both.choices[0].text == one == complete(client, prompt=ids).choices[0].text


def test_max_tokens_and_length(client):
    answer = complete(client, max_tokens=3, ignore_eos=True)
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"
    assert complete(client, max_tokens=1).usage.completion_tokens == 1


def test_seed_and_temperature(client):
    def drawn(seed):
        return complete(client, temperature=1.3, seed=seed, max_tokens=20).choices[0].text

    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in range(4)}) == 4


def test_top_k_one_top_p_tiny_and_min_p_one_are_greedy(client):
    greedy = complete(client).choices[0].text
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert complete(client, temperature=2.0, seed=5, **narrow).choices[0].text == greedy


def test_n_choices(client):
    answer = complete(client, n=3, temperature=1.2, seed=9, max_tokens=16)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    alone = complete(client, n=1, temperature=1.2, seed=9, max_tokens=16)
    assert alone.choices[0].text == answer.choices[0].text


def test_stop_strings_cut_before_the_match(client):
    text = complete(client, max_tokens=40).choices[0].text
    stop = text[12:17]
    cut = complete(client, max_tokens=40, stop=stop).choices[0]
    assert cut.text == text[: text.index(stop)]
    assert cut.finish_reason == "stop"


def test_stop_token_ids_and_min_tokens(client, shared):
    text = complete(client, max_tokens=8, ignore_eos=True).choices[0].text
    tokens = httpx.post(
        f"{shared.url}/tokenize",
        json={"model": NAME, "prompt": TALE + text, "add_special_tokens": False},
        timeout=10,
    ).json()["tokens"]
    third = tokens[-1]
    cut = complete(client, max_tokens=40, stop_token_ids=[third]).choices[0]
    assert cut.finish_reason == "stop"
    late = complete(client, max_tokens=40, stop_token_ids=[third], min_tokens=20)
    assert late.usage.completion_tokens >= 20


def test_logit_bias_forces_and_forbids(client):
    forced = complete(client, logit_bias={"260": 100}, max_tokens=3)
    assert forced.choices[0].text == forced.choices[0].text[:4] * 3
    first = complete(client, max_tokens=1, logprobs=1).choices[0].text
    assert complete(client, max_tokens=1, logit_bias={"260": -100}).choices[0].text != ""
    assert first


def test_penalties_change_a_repetitive_answer(client):
    prompt = "red red red red red red red red"
    plain = complete(client, prompt=prompt, max_tokens=24, ignore_eos=True).choices[0].text
    for penalty in (
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"repetition_penalty": 1.8},
    ):
        changed = complete(client, prompt=prompt, max_tokens=24, ignore_eos=True, **penalty)
        assert changed.choices[0].text != plain, penalty


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model=NAME, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens or len(entries) + 1 == (
        answer.usage.completion_tokens
    )
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
        assert sum(math.exp(t.logprob) for t in entry.top_logprobs) <= 1.0001


def test_completion_logprobs(client):
    answer = complete(client, logprobs=2, max_tokens=5, ignore_eos=True)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 5
    assert "".join(logprobs.tokens) == answer.choices[0].text


def test_cached_tokens_and_cache_salt(client):
    prompt = "A prompt of its own, long enough for several blocks: " + "so it goes, " * 20

    def cached(**fields):
        usage = complete(client, prompt=prompt, max_tokens=1, **fields).usage
        return usage.prompt_tokens_details.cached_tokens

    def is_found(**fields):
        """Return whether the prompt is cached within 20 tries: workers report caches later."""
        for _ in range(20):
            if cached(**fields) >= 32:
                return True
            time.sleep(0.1)
        return False

    cached()
    assert is_found()
    salt = f"secret for {client.default_headers['x-baton-mode']}"
    assert cached(cache_salt=salt) == 0
    assert is_found(cache_salt=salt)
