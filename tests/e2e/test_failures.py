"""What each failure looks like from the outside, with real processes and SmolLM2."""

import asyncio
import signal
import time

import httpx
import pytest

from tests.e2e.fleet_processes import chat, events, fleet, soon, streaming, text_of

STORY = "Tell me a long story about a lighthouse keeper and the sea."
LONG_PROMPT = "Read this list and say one word. " + " ".join(f"item {i}" for i in range(250))


async def test_paris_disaggregated_then_cached(shared):
    before = shared.transfers()
    body = chat("What is the capital of France?")
    assert "Paris" in await text_of(shared.url, body, "disaggregated")
    after = shared.transfers()  # at once: the worker says so before the second token
    assert after["count"] == before["count"] + 1
    assert after["bytes"] > before["bytes"]
    again = httpx.post(f"{shared.url}/v1/chat/completions", json=body, timeout=30)
    assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert "cached=" in again.headers["x-baton-route"]


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seeded"])
async def test_the_path_never_shows_in_the_text(shared, fields):
    body = chat(STORY, max_tokens=24, **fields)
    texts = {mode: await text_of(shared.url, body, mode) for mode in ("disaggregated", "colocated")}
    assert texts["disaggregated"] == texts["colocated"]


@pytest.mark.parametrize("after_tokens", [0, pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize(
    "mode", ["disaggregated", pytest.param("colocated", marks=pytest.mark.slow)]
)
async def test_a_client_that_leaves_frees_everything(shared, mode, after_tokens):
    body = chat(f"{mode} {after_tokens} {LONG_PROMPT}", max_tokens=500)
    seen = 0

    async def read_some() -> None:
        nonlocal seen
        async with streaming(shared.url, body, mode) as response:
            async for _ in events(response):
                seen += 1
                if seen >= after_tokens:
                    return

    if after_tokens:
        await read_some()
    else:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.15):
                await read_some()
    await asyncio.to_thread(shared.assert_baseline, 4.0)


async def test_a_second_router_knows_what_the_first_knows_and_leaves_nothing_when_it_dies(shared):
    await text_of(shared.url, chat("Move some blocks.", max_tokens=3), "disaggregated")
    await asyncio.sleep(1.5)  # the sums are written once a second
    second = await asyncio.to_thread(shared.start_router)
    before = shared.transfers()
    assert httpx.get(f"{second}/fleet", timeout=5).json()["transfers"] == before
    body = chat("Name three colours of the rainbow.", max_tokens=12)
    assert await text_of(shared.url, body) == await text_of(second, body)
    ours, theirs = shared.workers_shown(), shared.workers_shown(second)
    same = ("id", "role", "state", "incarnation", "epoch", "pid", "address")
    assert [{k: w[k] for k in same} for w in ours.values()] == [
        {k: w[k] for k in same} for w in theirs.values()
    ]

    def cached() -> list[int]:
        answers = [
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30).json()
            for url in (shared.url, second)
        ]
        return [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]

    # What was computed a moment ago is told within some tenths of a second.
    await soon(lambda: len(set(found := cached())) == 1 and found[0] > 0)
    async with streaming(second, chat(STORY, max_tokens=1500), "colocated") as response:
        async for _ in events(response):
            break
        process, _ = shared.routers.pop()
        process.kill()
        process.wait()
    await asyncio.to_thread(shared.assert_baseline, 10.0)


async def test_redis_dies_and_comes_back_empty(shared):
    """20 s without Redis in `make test-all`; here long enough for every reader to notice."""
    await outage(shared, seconds=4.0)


@pytest.mark.slow
async def test_redis_is_away_for_20_s(shared):
    await outage(shared, seconds=20.0)


async def outage(shared, seconds: float) -> None:
    shared.redis.kill()
    until = time.monotonic() + seconds
    number = 0
    while time.monotonic() < until:
        number += 1
        text = await text_of(
            shared.url, chat(f"Say the number {number}.", max_tokens=6), "disaggregated"
        )
        assert text
    shared.redis.start()
    body = chat("Which river flows through Paris, and where does it end?", max_tokens=4)
    await text_of(shared.url, body, "disaggregated")

    def healed() -> bool:
        answer = httpx.post(f"{shared.url}/v1/chat/completions", json=body, timeout=30).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    await soon(healed, 15)
    states = {w["state"] for w in shared.workers_shown().values()}
    assert states == {"ready"}
    await asyncio.to_thread(shared.assert_baseline)


# ---- from here on workers die, and stay dead -----------------------------------------------------


ANSWERS = {
    "greedy": chat(STORY, max_tokens=120),
    "seeded, with penalties": chat(
        STORY, max_tokens=90, temperature=0.9, seed=4, presence_penalty=0.6, repetition_penalty=1.1
    ),
    "logprobs of two choices": chat(
        STORY, max_tokens=60, n=2, temperature=0.7, seed=5, logprobs=True, top_logprobs=2
    ),
    "a grammar": chat(
        "Write a list.", max_tokens=80, structured_outputs={"regex": "(item [a-z]{3,9}, ){14}end"}
    ),
    "a stop string": chat(STORY, max_tokens=120, stop=[" sea"]),
}


async def read(
    url: str, body: dict, begun: asyncio.Event | None = None, mode: str = "auto"
) -> dict[int, list]:
    """Each choice's text, log-probabilities and end; ``begun`` is set by the fourth event."""
    shown: dict[int, list] = {}
    seen = 0
    async with streaming(url, body, mode) as response:
        async for event in events(response):
            assert "error" not in event, event
            seen += 1
            if begun is not None and seen == 4:
                begun.set()
            for choice in event["choices"]:
                text, logprobs, _ = shown.setdefault(choice["index"], ["", [], None])
                logprobs += (choice["logprobs"] or {"content": []})["content"]
                shown[choice["index"]] = [
                    text + choice["delta"].get("content", ""),
                    logprobs,
                    choice["finish_reason"],
                ]
    return shown


@pytest.mark.costly
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
async def test_answers_outlive_their_decode_worker(tmp_path, how):
    """Five kinds of answer are under way when the worker goes; all clients see is a pause."""
    with fleet(tmp_path, "prefill-0", "decode-0", "decode-1") as running:
        answers = await asyncio.gather(*(read(running.url, body) for body in ANSWERS.values()))
        want = dict(zip(ANSWERS, answers, strict=True))
        begun = {name: asyncio.Event() for name in ANSWERS}
        asked = {  # an idle prefill worker may answer otherwise, with what it has cached
            name: asyncio.create_task(read(running.url, body, begun[name], "disaggregated"))
            for name, body in ANSWERS.items()
        }
        for event in begun.values():
            await event.wait()
        busy: list[dict] = []
        while not busy:  # a report is a quarter of a second old
            shown = running.workers_shown().values()
            busy = [one for one in shown if one["role"] == "decode" and one["running"]]
            await asyncio.sleep(0.02)
        worker = running.workers[max(busy, key=lambda one: one["running"])["id"]]
        if how == signal.SIGKILL:
            worker.kill()
        else:
            worker.process.terminate()
        for name, task in asked.items():
            assert await task == want[name], name
        metrics = httpx.get(f"{running.url}/metrics").text
        moved = [
            float(line.split()[-1])
            for line in metrics.splitlines()
            if line.startswith("baton_migrations_total{")
        ]
        assert sum(moved) >= 1
        if how == signal.SIGTERM:
            assert await asyncio.to_thread(worker.process.wait, 15) == 0
        await asyncio.to_thread(running.assert_baseline)
