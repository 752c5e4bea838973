"""A fleet that speculates gives the answers of a fleet that does not, over HTTP, in both modes."""

import httpx
import pytest
from openai import OpenAI

from engine.core.speculation import SpeculationSettings
from tests.e2e.fleet_processes import NAME, fleet

LIST = "name: Ada, city: London\nname: Alan, city: London\nname: Ada, city: London\nname:"
CASES = [
    {"temperature": 0, "max_tokens": 40},
    {"temperature": 1, "seed": 3, "max_tokens": 24, "n": 2},
    {"temperature": 0.8, "seed": 4, "top_p": 0.9, "max_tokens": 24, "logprobs": 2},
    {"temperature": 0, "max_tokens": 40, "stop": ["Alan"]},
    {"temperature": 0, "max_tokens": 24, "frequency_penalty": 0.6, "presence_penalty": 0.4},
]


@pytest.fixture(scope="module")
def speculating(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    ngram = SpeculationSettings(mode="ngram")
    with fleet(folder, "prefill-0", "decode-0", speculation=ngram) as running:
        yield running


def complete(url: str, mode: str, **fields):
    with OpenAI(base_url=f"{url}/v1", api_key="x", default_headers={"x-baton-mode": mode}) as made:
        return made.completions.create(model=NAME, prompt=LIST, **fields)


@pytest.mark.parametrize("mode", ["disaggregated", "colocated"])
@pytest.mark.parametrize("fields", CASES, ids=range(len(CASES)))
def test_the_answers_are_those_of_a_fleet_without_speculation(shared, speculating, fields, mode):
    want = complete(shared.url, "disaggregated", **fields)
    got = complete(speculating.url, mode, **fields)
    assert [choice.model_dump() for choice in got.choices] == [
        choice.model_dump() for choice in want.choices
    ]
    assert got.usage == want.usage


def test_guesses_were_made_and_are_counted(speculating):
    streamed = ""
    with OpenAI(base_url=f"{speculating.url}/v1", api_key="x") as client:
        stream = client.completions.create(
            model=NAME, prompt=LIST, temperature=0, max_tokens=48, stream=True
        )
        for chunk in stream:
            streamed += chunk.choices[0].text
    assert "London" in streamed
    counted: dict[str, float] = {}
    for worker in speculating.workers.values():
        page = httpx.get(f"http://{worker.record.metrics_address}/metrics", timeout=5).text
        for line in page.splitlines():
            if "spec" in line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                counted[name] = counted.get(name, 0) + float(value)
    assert counted["baton_spec_draft_tokens_total"] > counted["baton_spec_drafts_total"] > 0
    assert counted["baton_spec_accepted_tokens_total"] > 0
    assert "vllm:spec_decode_num_accepted_tokens_total" in counted
    speculating.assert_baseline()
