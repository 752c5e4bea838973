"""Scores, rankings and vectors, in the shapes of vLLM, Jina and Cohere."""

import base64
import math
import struct

import pytest

from tests.router.conftest import MODEL
from tests.router.emulated_worker import Script

SHORT, LONG = "a cat", "a cat that sat on the mat and looked at the rat for a long while"


@pytest.fixture
async def fleet(make_fleet):
    return await make_fleet({"decode-0": Script(step_s=0.001)}, window_requests=4)


@pytest.fixture
def vector(model):
    """Of an emulated worker: (3, 4, length of the prompt, 0)."""

    def unit(text: str, most: int | None = None) -> list[float]:
        count = len(model.tokenizer.encode(text)[:most])
        length = math.hypot(3, 4, count)
        return [3 / length, 4 / length, count / length, 0.0]

    return unit


def cosine(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


async def post(fleet, path: str, **body):
    return await fleet.http.post(path, json={"model": MODEL, **body})


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_one_text_with_each_of_several(fleet, vector, path):
    answer = await post(fleet, path, text_1=SHORT, text_2=[SHORT, LONG])
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["object"], body["model"]) == ("list", MODEL)
    assert [entry["index"] for entry in body["data"]] == [0, 1]
    assert {entry["object"] for entry in body["data"]} == {"score"}
    assert body["data"][0]["score"] == pytest.approx(1.0)
    assert body["data"][1]["score"] == pytest.approx(cosine(vector(SHORT), vector(LONG)))
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] > 0
    assert body["id"] == answer.headers["x-request-id"]
    # Each text was computed once.
    assert len(fleet.workers["decode-0"].submissions) == 3


async def test_texts_in_pairs_also_by_the_later_names(fleet, vector):
    pairs = {"text_1": [SHORT, LONG], "text_2": [LONG, SHORT]}
    named = {"queries": [SHORT, LONG], "documents": [LONG, SHORT]}
    for body in (pairs, named):
        data = (await post(fleet, "/v1/score", **body)).json()["data"]
        expected = cosine(vector(SHORT), vector(LONG))
        assert [entry["score"] for entry in data] == pytest.approx([expected, expected])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_come_nearest_first_with_their_places(fleet, vector, path):
    documents = [LONG, {"text": SHORT}, LONG + " " + LONG]
    body = (await post(fleet, path, query=SHORT, documents=documents)).json()
    assert [result["index"] for result in body["results"]] == [1, 0, 2]
    assert body["results"][0]["document"] == {"text": SHORT}
    scores = [result["relevance_score"] for result in body["results"]]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == pytest.approx(1.0)
    assert scores[1] == pytest.approx(cosine(vector(SHORT), vector(LONG)))
    assert body["usage"]["total_tokens"] > 0


async def test_only_the_best_and_without_their_texts(fleet):
    documents = [LONG, SHORT, LONG]
    few = await post(
        fleet, "/v1/rerank", query=SHORT, documents=documents, top_n=2, return_documents=False
    )
    assert [result["index"] for result in few.json()["results"]] == [1, 0]
    assert all("document" not in result for result in few.json()["results"])
    all_of_them = await post(fleet, "/v1/rerank", query=SHORT, documents=documents, top_n=99)
    assert len(all_of_them.json()["results"]) == 3


async def test_texts_are_cut_where_that_is_asked_for(fleet, vector):
    for limit in ({"max_tokens_per_doc": 2}, {"truncate_prompt_tokens": 2}):
        body = {"query": SHORT, "documents": [LONG], **limit}
        [result] = (await post(fleet, "/v2/rerank", **body)).json()["results"]
        assert result["relevance_score"] == pytest.approx(1.0)  # "a cat" is two tokens
    too_long = "word " * 9000
    refused = await post(fleet, "/score", text_1=SHORT, text_2=[SHORT, too_long])
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("text_2[1]", "context_length_exceeded")
    assert "truncate_prompt_tokens" in error["message"]
    cut = await post(fleet, "/score", text_1=SHORT, text_2=too_long, truncate_prompt_tokens=-1)
    assert cut.status_code == 200
    assert len(fleet.workers["decode-0"].submissions[-1].prompt_tokens) // 4 == 8192
    ranked = await post(
        fleet, "/rerank", query=SHORT, documents=[too_long], truncate_prompt_tokens=-1
    )
    assert ranked.status_code == 200


async def test_pooling_is_the_vector_itself(fleet, vector):
    body = (await post(fleet, "/pooling", input=[SHORT, LONG])).json()
    assert [entry["object"] for entry in body["data"]] == ["pooling", "pooling"]
    assert body["data"][1]["data"] == pytest.approx(vector(LONG))
    spelled = await post(fleet, "/pooling", input=[1, 2, 3], encoding_format="base64", task="embed")
    numbers = struct.unpack("<4f", base64.b64decode(spelled.json()["data"][0]["data"]))
    assert numbers == pytest.approx([n / math.hypot(3, 4, 3) for n in (3, 4, 3, 0)])
    plain = await post(fleet, "/pooling", input=[1, 2, 3], normalize=False, dimensions=3)
    assert plain.json()["data"][0]["data"] == [3, 4, 3]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_2": "a"}, "text_1"),
        ("/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ("/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/score", {"text_1": "a", "text_2": ["b"] * 2048}, "text_2"),
        ("/score", {"text_1": "", "text_2": "a"}, "text_1[0]"),
        ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0}, "truncate_prompt"),
        ("/score", {"text_1": {"content": []}, "text_2": "b"}, "text_1"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]"),
        ("/rerank", {"query": "a", "documents": [{"image": "x"}]}, "documents[0]"),
        ("/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"] * 2048}, "documents"),
        ("/pooling", {"input": "a", "task": "classify"}, "task"),
        ("/pooling", {"input": "a", "dimensions": 100_000}, "dimensions"),
        ("/pooling", {"input": [-1]}, "input"),
        ("/pooling", {"input": ["a"], "model": "other"}, "model"),
    ],
)
async def test_what_cannot_be_scored_is_refused_by_name(fleet, path, body, param):
    refused = await post(fleet, path, **body)
    assert refused.status_code in (400, 404), refused.text
    assert refused.json()["error"]["param"].startswith(param), refused.text


async def test_a_worker_that_fails_fails_the_whole_ranking(make_fleet):
    fleet = await make_fleet({"decode-0": Script(fail=("numerics_error", "NaN", False))})
    refused = await post(fleet, "/rerank", query="a", documents=["b", "c"])
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "numerics_error")
