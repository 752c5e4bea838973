"""Replicas of several ranks over HTTP: the text of one rank, in both modes."""

from pathlib import Path

import pytest

from tests.e2e.fleet_processes import Fleet, chat, soon, text_of

QUESTIONS = [
    chat("What is the capital of France?", max_tokens=24),
    chat("Tell me about the sea.", max_tokens=24, temperature=0.8, seed=7),
]


@pytest.mark.slow
async def test_prefill_of_two_ranks_and_decode_of_three_answer_as_one_rank(
    shared: Fleet, tmp_path: Path
) -> None:
    wide = Fleet(tmp_path)
    try:
        wide.start("prefill-0", tensor_parallel=2)
        wide.start_workers("decode-0", tensor_parallel=3)

        def ranks() -> dict[str, int]:
            return {name: len(shown["ranks"]) for name, shown in wide.workers_shown().items()}

        await soon(lambda: ranks() == {"prefill-0": 2, "decode-0": 3})
        wide.wait_ready(wide.url)
        for body in QUESTIONS:
            expected = await text_of(shared.url, body)
            for mode in ("disaggregated", "colocated"):
                assert await text_of(wide.url, body, mode) == expected
        await soon(lambda: wide.transfers()["count"] >= 2)
        wide.assert_baseline()
    finally:
        wide.stop()
