"""A fleet that speculates counts its guesses; that they never show is `tests/matrix`' to show."""

import httpx
import pytest

from baton.engine.core.speculative.proposers import SpeculationSettings
from tests.e2e.fleet_processes import NAME, fleet, samples, total

LIST = "name: Ada, city: London\nname: Alan, city: London\nname: Ada, city: London\nname:"


@pytest.mark.slow
def test_guesses_were_made_and_are_counted(tmp_path):
    ngram = SpeculationSettings(mode="ngram")
    with fleet(tmp_path, "prefill-0", "decode-0", speculation=ngram) as running:
        body = {"model": NAME, "prompt": LIST, "temperature": 0, "max_tokens": 48}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
        assert "London" in answer.json()["choices"][0]["text"]
        pages = [samples(f"http://{w.record.metrics_address}") for w in running.workers.values()]

        def counted(name: str) -> float:
            return sum(total(page, name) for page in pages)

        drafts = counted("baton_spec_drafts_total")
        assert counted("baton_spec_draft_tokens_total") > drafts > 0
        assert counted("baton_spec_accepted_tokens_total") > 0
        assert counted("vllm:spec_decode_num_accepted_tokens_total") > 0
        running.assert_baseline()
