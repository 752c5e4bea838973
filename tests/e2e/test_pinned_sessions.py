"""A session that a client pins is cached after others have filled the pools of both workers."""

import httpx

from tests.e2e.conftest import PAIR_BLOCKS, Pair
from tests.e2e.fleet_processes import Fleet, chat

SESSION_WORDS = 172


def ask(running: Fleet, name: str, turns: int, **hints: object) -> dict[str, int]:
    text = f"{name}: " + " ".join(f"{name}{number % 10}" for number in range(SESSION_WORDS))
    body = chat(text, max_tokens=2, **hints)
    body["messages"] += [{"role": "user", "content": "And then?"}] * (turns - 1)
    headers = {"x-baton-mode": "disaggregated"}
    answer = httpx.post(
        f"{running.url}/v1/chat/completions", json=body, headers=headers, timeout=60
    )
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return {"prompt": usage["prompt_tokens"], **usage["prompt_tokens_details"]}


def test_a_pinned_session_is_cached_when_others_have_filled_the_pools(pair: Pair) -> None:
    running = pair.fleet
    first = ask(running, "k", 1, prompt_cache_retention="1h")
    ask(running, "u", 1)
    share = first["prompt"] / (PAIR_BLOCKS * 16)
    assert 0.2 < share < 0.25, "within the budget; five fill the pool"
    for name in "vwxyz":
        ask(running, name, 1)
    kept = ask(running, "k", 2)
    assert kept["cached_tokens"] > 0.9 * first["prompt"]
    assert ask(running, "u", 2)["cached_tokens"] < 100
