"""A fleet that speculates gives the answers of a fleet that does not, over HTTP, in both modes."""

import httpx
import pytest
from openai import OpenAI

from baton.engine.core.speculative.proposers import SpeculationSettings
from tests.e2e.fleet_processes import MODEL, NAME, fleet

LIST = "name: Ada, city: London\nname: Alan, city: London\nname: Ada, city: London\nname:"
CASES = {
    "greedy": {"temperature": 0, "max_tokens": 40},
    "two choices": {"temperature": 1, "seed": 3, "max_tokens": 24, "n": 2},
    "grammar": {
        "temperature": 1,
        "seed": 5,
        "max_tokens": 40,
        "extra_body": {"guided_regex": r"( (Ada|Alan), city: [A-Z][a-z]{2,8}\nname:){2}"},
    },
    "logprobs": {"temperature": 0.8, "seed": 4, "top_p": 0.9, "max_tokens": 24, "logprobs": 2},
    "stop": {"temperature": 0, "max_tokens": 40, "stop": ["Alan"]},
    "penalties": {"max_tokens": 24, "seed": 1, "frequency_penalty": 0.6, "presence_penalty": 0.4},
}


@pytest.fixture(scope="module")
def speculating(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    ngram = SpeculationSettings(mode="ngram")
    with fleet(folder, "prefill-0", "decode-0", speculation=ngram) as running:
        yield running


def complete(url: str, mode: str, **fields):
    with OpenAI(base_url=f"{url}/v1", api_key="x", default_headers={"x-baton-mode": mode}) as made:
        return made.completions.create(model=NAME, prompt=LIST, **fields)


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_the_answers_are_those_of_a_fleet_without_speculation(shared, speculating, case):
    want = complete(shared.url, "disaggregated", **CASES[case])
    for mode in ("disaggregated", "colocated"):
        got = complete(speculating.url, mode, **CASES[case])
        assert [choice.model_dump() for choice in got.choices] == [
            choice.model_dump() for choice in want.choices
        ]
        assert got.usage.completion_tokens == want.usage.completion_tokens


def counted(running) -> dict[str, float]:
    """Speculation's counters, summed over the workers."""
    found: dict[str, float] = {}
    for worker in running.workers.values():
        page = httpx.get(f"http://{worker.record.metrics_address}/metrics", timeout=5).text
        for line in page.splitlines():
            if "spec" in line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                found[name] = found.get(name, 0) + float(value)
    return found


@pytest.mark.slow
def test_guesses_were_made_and_are_counted(speculating):
    streamed = ""
    with OpenAI(base_url=f"{speculating.url}/v1", api_key="x") as client:
        stream = client.completions.create(
            model=NAME, prompt=LIST, temperature=0, max_tokens=48, stream=True
        )
        for chunk in stream:
            streamed += chunk.choices[0].text
    assert "London" in streamed
    found = counted(speculating)
    assert found["baton_spec_draft_tokens_total"] > found["baton_spec_drafts_total"] > 0
    assert found["baton_spec_accepted_tokens_total"] > 0
    assert "vllm:spec_decode_num_accepted_tokens_total" in found
    speculating.assert_baseline()


@pytest.mark.slow
def test_a_draft_model_computes_prompts_that_were_handed_over(shared, tmp_path):
    """The model as its own draft: all draft tokens are right, in both modes, at any temperature."""
    draft = SpeculationSettings(mode="draft", draft=MODEL, tokens=3)
    with fleet(tmp_path, "prefill-0", "decode-0", speculation=draft) as running:
        for mode in ("disaggregated", "colocated"):
            for fields in CASES.values():
                want = complete(shared.url, "disaggregated", **fields)
                got = complete(running.url, mode, **fields)
                assert [c.text for c in got.choices] == [c.text for c in want.choices]
        found = counted(running)
        accepted, guessed = (
            found[f"baton_spec_{name}_tokens_total"] for name in ("accepted", "draft")
        )
        assert guessed >= accepted > 0.9 * guessed > 0, "some ran into the end of an answer"
        running.assert_baseline()
