"""Prompt log-probabilities and embeddings with the official client, with and without a hand-off."""

import math

import httpx
import pytest

from tests.e2e.fleet_processes import NAME

TEXT = "The sun rises in the east and sets in the west. The capital of France is Paris."


@pytest.fixture(scope="module")
def ids(shared):
    body = {"model": NAME, "prompt": TEXT}
    return httpx.post(f"{shared.url}/tokenize", json=body, timeout=10).json()["tokens"]


def score(client, prompt=TEXT, **fields):
    fields = {"echo": True, "logprobs": 2, "max_tokens": 0, "temperature": 0, **fields}
    return client.completions.create(model=NAME, prompt=prompt, **fields)


def test_scores_of_text_and_of_ids_are_the_same_on_every_way(client, anywhere, ids):
    [first] = score(client).choices
    again = score(client, prompt=[ids, ids[:9]])
    [third] = score(anywhere).choices
    assert first.text == TEXT
    assert first.logprobs == again.choices[0].logprobs == third.logprobs
    assert again.choices[1].logprobs.token_logprobs == first.logprobs.token_logprobs[:9]
    assert first.logprobs.token_logprobs[0] is None
    assert "".join(first.logprobs.tokens) == TEXT
    assert all(value <= 0 for value in first.logprobs.token_logprobs[1:])
    paris = first.logprobs.tokens.index(" Paris")
    assert first.logprobs.token_logprobs[paris] > -1.0
    assert again.usage.completion_tokens == 0


def test_answer_and_prompt_agree_on_their_scores(client, ids):
    """What was drawn in one request has the same log-probability as a prompt of the next."""
    [answer] = score(client, max_tokens=6, n=1).choices
    drawn = answer.logprobs.token_logprobs[len(ids) :]
    [whole] = score(client, prompt=answer.text).choices
    assert whole.logprobs.tokens == answer.logprobs.tokens  # else there is nothing to compare
    assert whole.logprobs.token_logprobs[-6:] == drawn
    stream = score(client, max_tokens=6, stream=True)
    values = [
        v for c in stream if c.choices[0].logprobs for v in c.choices[0].logprobs.token_logprobs
    ]
    assert values == answer.logprobs.token_logprobs


def test_vllms_prompt_logprobs(client, ids):
    answer = client.completions.create(
        model=NAME, prompt=TEXT, max_tokens=1, extra_body={"prompt_logprobs": 1}
    )
    found = answer.choices[0].prompt_logprobs
    echoed = score(client).choices[0].logprobs.token_logprobs
    assert [
        entry and entry[str(i)]["logprob"] for entry, i in zip(found, ids, strict=True)
    ] == echoed


def test_embeddings(client, shared, ids):
    cat, kitten, bond = (
        "A cat sleeps on the sofa.",
        "A kitten is sleeping on the couch.",
        "The central bank raised its interest rate by a quarter point.",
    )
    before = shared.transfers()["count"]
    answer = client.embeddings.create(model=NAME, input=[cat, kitten, bond, TEXT])
    assert shared.transfers()["count"] == before, "a vector needs no KV to move"
    vectors = [entry.embedding for entry in answer.data]
    assert {len(vector) for vector in vectors} == {576}
    assert all(math.isclose(sum(x * x for x in v), 1, rel_tol=1e-5) for v in vectors)

    def alike(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True))

    assert alike(vectors[0], vectors[1]) > alike(vectors[0], vectors[2])
    alone = client.embeddings.create(model=NAME, input=ids, encoding_format="float")
    assert alone.data[0].embedding == vectors[3]
    assert alone.usage.prompt_tokens == len(ids)
    last = client.embeddings.create(model=NAME, input=ids, extra_body={"pooling": "last"})
    assert last.data[0].embedding != vectors[3]
    shared.assert_baseline()
