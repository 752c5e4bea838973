"""A planted cause is told, by its name and with its figures; where nothing was slow, that is."""

from dataclasses import replace

import pytest

from router.routing.reports.why import Facts, why

QUICK = {"tokenize": 0.002, "queue": 0.001, "prefill": 0.08, "decode": 0.3, "delivery": 0.001}


def facts(elapsed_s: float = 0.4, phases: dict | None = None, **changes) -> Facts:
    fields = {
        "prompt_tokens": 120,
        "cached_tokens": 0,
        "completion_tokens": 16,
        "prefill_worker": "prefill-1",
        "decode_worker": "decode-0",
        "prefill_s": 0.08,
        "peers_prefill_tokens_per_s": 1500.0,
        "usual_gap_s": 0.02,
        "expected_step_s": 0.02,
        "stalls_s": (0.022, 0.021, 0.02),
    }
    return Facts(elapsed_s=elapsed_s, phases_s=QUICK | (phases or {}), **fields | changes)


PLANTED = {
    "queued": (facts(3.0, {"queue": 2.6}), ["2.60 s", "router's queue"]),
    "worker_queue": (facts(3.0, {"queue": 2.6}, worker_queue_s=2.59), ["2.59 s", "prefill-1"]),
    "slow_prefill_worker": (
        facts(1.5, {"prefill": 1.2}, prefill_s=1.2),
        ["prefill-1", "100 tokens/s", "1500"],
    ),
    "repaired": (
        facts(
            3.0,
            {"unattributed": 0.1, "queue": 2.0},
            lost_to_repairs_s=2.0,
            repairs=("prefill prefill-0 failed: the frame is damaged",),
        ),
        ["2.00 s", "the frame is damaged"],
    ),
    "moved": (
        facts(
            2.5,
            {"decode": 2.1},
            paused_s=1.8,
            moves=("worker leaving", "worker lost"),
            stalls_s=(1.8, 0.02, 0.02),
        ),
        ["1.80 s", "decode-0 resumed it", "2 migrations", "worker lost"],
    ),
    "preempted": (
        facts(2.5, {"decode": 2.3}, preemptions=2, stalls_s=(1.8, 0.3, 0.02)),
        ["preempted it 2 times", "2.06 s", "decode-0"],
    ),
    "stalled": (
        facts(2.5, {"decode": 2.1}, stalls_s=(1.8, 0.02, 0.02), stalled_before_token=7),
        ["1.80 s", "before token 7"],
    ),
    "slow_decode": (
        facts(1.5, {"decode": 1.3}, usual_gap_s=0.08, stalls_s=(0.09, 0.08, 0.08)),
        ["80.0 ms", "20.0 ms", "decode-0"],
    ),
    "long_prompt": (
        facts(3.5, {"prefill": 3.0}, prompt_tokens=4000, prefill_s=3.0),
        ["4000 tokens", "3.00 s", "nothing of it was in the cache"],
    ),
    "no_prefix_hit": (
        facts(
            3.5,
            {"prefill": 3.0},
            prompt_tokens=4000,
            prefill_s=3.0,
            held_elsewhere_tokens=3600,
        ),
        ["3600 tokens", "another worker"],
    ),
    "transfer": (
        facts(1.5, {"transfer": 1.0}, transfer_bytes=8 << 20, stalls_s=(1.02, 0.02, 0.02)),
        ["8.0 MiB", "prefill-1 to decode-0", "1.00 s"],
    ),
    "reservation": (facts(9.0, {"reservation": 5.09}), ["5.09 s", "decode-0", "KV blocks"]),
    "shared_steps": (facts(9.0, {"shared_steps": 4.1}), ["4.10 s", "prefill-1", "other requests"]),
    "between_workers": (
        facts(2.0, {"between_workers": 1.5}),
        ["1.50 s", "decode-0 and prefill-1", "network"],
    ),
    "prefix_wait": (
        facts(5.0, {"queue": 4.1}, prefix_wait_s=4.0),
        ["4.00 s", "another request computed"],
    ),
    "slow_client": (facts(5.0, {"delivery": 4.5}), ["4.50 s", "client"]),
    "tokenize": (facts(1.0, {"tokenize": 0.6}), ["0.60 s", "tokenizing"]),
    "unattributed": (facts(1.0, {"unattributed": 0.6}), ["0.60 s", "network"]),
    "nothing_slow": (facts(), ["0.40 s in total", "0.30 s of it generating 16 tokens"]),
}


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_is_told(cause: str) -> None:
    planted, said = PLANTED[cause]
    found = why(planted)
    assert found.cause == cause, found
    for words in said:
        assert words in found.sentence
    assert found.sentence.count(". ") == 0, "one sentence"


def test_of_two_causes_the_dearer_one_is_told() -> None:
    both = facts(5.0, {"queue": 1.0, "prefill": 3.0}, prefill_s=3.0)
    assert why(both).cause == "slow_prefill_worker"
    assert why(facts(5.0, {"queue": 4.0, "prefill": 0.6}, prefill_s=0.6)).cause == "queued"


def test_a_small_part_of_a_long_request_is_no_cause() -> None:
    long = facts(60.0, {"queue": 0.5, "decode": 59.0}, completion_tokens=3000)
    assert why(long).cause == "nothing_slow"


def test_a_repair_that_local_prefill_answered_names_the_damage_not_the_queue() -> None:
    told = why(facts(0.9, {"queue": 0.3}, lost_to_repairs_s=0.3, repairs=("prefill-0 failed: x",)))
    assert told.cause == "repaired"


def test_a_failure_says_what_failed_and_what_came_before() -> None:
    failed = facts(3.0, {"queue": 2.6}, error="deadline_exceeded (it did not end within 3 s)")
    told = why(failed)
    assert told.cause == "failed"
    assert "deadline_exceeded" in told.sentence
    assert "router's queue" in told.sentence


def test_a_request_that_waits_says_so() -> None:
    assert why(Facts(elapsed_s=2.0, state="queued")).cause == "queued"


def test_of_a_request_without_a_token_both_ways_to_wait_are_told() -> None:
    """It may wait for pages: that its prompt is being computed would be a guess."""
    placed = {"tokenize": 0.01, "queue": 0.01, "prefill": 4.1}
    told = why(replace(facts(4.12), phases_s=placed, prefill_s=0.0, state="running"))
    assert told.cause == "no_token_yet"
    assert "4.10 s" in told.sentence
    assert "blocks at decode-0, or prefill-1" in told.sentence
    answering = why(replace(facts(4.12), phases_s=placed | {"decode": 0.0}, state="running"))
    assert answering.cause != "no_token_yet"


def test_of_a_few_tokens_no_rate_is_told() -> None:
    assert why(facts(0.3, {"prefill": 0.2}, prefill_s=0.2, cached_tokens=117)).cause != (
        "slow_prefill_worker"
    )


def test_nothing_measured_is_nothing_claimed() -> None:
    assert why(Facts(elapsed_s=0.0)).cause == "nothing_slow"
