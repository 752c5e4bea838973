"""What each failure looks like from the outside, with real processes and SmolLM2."""

import asyncio
import os
import signal
import time

import httpx
import pytest

from tests.e2e.fleet_processes import NAME, chat, events, fleet, soon, streaming, text_of

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


async def test_a_mode_is_kept(shared):
    for mode in ("disaggregated", "colocated"):
        async with streaming(shared.url, chat("Hi", max_tokens=2), mode) as response:
            assert f"mode={mode}" in response.headers["x-baton-route"]


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


async def test_two_routers_agree(shared):
    second = await asyncio.to_thread(shared.start_router)
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
    process, _ = shared.routers.pop()
    process.terminate()
    assert await asyncio.to_thread(process.wait, 10) == 0


async def test_a_router_that_dies_leaves_nothing_behind(shared):
    second = await asyncio.to_thread(shared.start_router)
    async with streaming(second, chat(STORY, max_tokens=1500), "colocated") as response:
        async for _ in events(response):
            break
        process, _ = shared.routers.pop()
        process.kill()
        process.wait()
    await asyncio.to_thread(shared.assert_baseline, 10.0)


async def test_a_second_router_knows_the_transfers_of_the_first(shared):
    await text_of(shared.url, chat("Move some blocks.", max_tokens=3), "disaggregated")
    await asyncio.sleep(1.5)  # the sums are written once a second
    second = await asyncio.to_thread(shared.start_router)
    before = shared.transfers()
    after = httpx.get(f"{second}/fleet", timeout=5).json()["transfers"]
    assert after == before
    process, _ = shared.routers.pop()
    process.terminate()
    process.wait(10)


async def test_garbage_is_answered_and_forgotten(shared):
    async with httpx.AsyncClient(base_url=shared.url, timeout=10) as client:
        for content in (b"", b"{", b"\xff\xfe", b"[]", b'"x"', b'{"model": 1}', b"null"):
            answer = await client.post(
                "/v1/chat/completions",
                content=content,
                headers={"content-type": "application/json"},
            )
            assert answer.status_code == 400, (content, answer.text)
            assert answer.json()["error"]["message"]
        answer = await client.post("/v1/completions", content=b"x" * (5 << 20))
        assert answer.status_code == 413
    assert "Paris" in await text_of(shared.url, chat("What is the capital of France?"))


@pytest.mark.slow
async def test_over_the_queue_limit_is_429(shared):
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=shared.url, timeout=120, limits=limits) as client:
        many = [
            client.post(
                "/v1/completions",
                json={"model": NAME, "prompt": f"{i} is", "max_tokens": 40, "ignore_eos": True},
            )
            for i in range(160)
        ]
        answers = await asyncio.gather(*many)
    codes = {answer.status_code for answer in answers}
    assert codes == {200, 429}, "accepted requests finish, the others are told at once"
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    await asyncio.to_thread(shared.assert_baseline, 5.0)


async def test_a_deadline_is_504(shared):
    async with httpx.AsyncClient(base_url=shared.url, timeout=10) as client:
        answer = await client.post(
            "/v1/chat/completions",
            json=chat("In 200 ms: " + LONG_PROMPT, max_tokens=400),
            headers={"x-baton-timeout-ms": "200"},
        )
    assert answer.status_code == 504
    await asyncio.to_thread(shared.assert_baseline, 4.0)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "delay_s",
    [
        pytest.param(0.05, id="before or during"),
        pytest.param(0.6, id="during or after"),
    ],
)
async def test_kill_the_prefill_worker_and_the_request_completes(tmp_path, delay_s):
    with fleet(tmp_path, "prefill-0", "prefill-1", "decode-0") as running:
        body = chat(LONG_PROMPT, max_tokens=16)
        want = await text_of(running.url, body, "colocated")
        fresh = chat("Now " + LONG_PROMPT, max_tokens=16)
        asking = asyncio.create_task(text_of(running.url, fresh, "disaggregated"))
        await asyncio.sleep(delay_s)
        busy = [w for w in running.workers_shown().values() if w["role"] == "prefill"]
        victim = max(busy, key=lambda w: (w["running"] + w["waiting"], w["kv_blocks"]["leased"]))
        running.workers[victim["id"]].kill()
        assert await asking == await text_of(running.url, fresh, "colocated")
        assert await text_of(running.url, body, "disaggregated") == want
        await soon(lambda: running.workers_shown()[victim["id"]]["state"] == "dead")
        shown = running.workers_shown()[victim["id"]]
        assert set(shown["kv_blocks"].values()) == {0}
        await asyncio.to_thread(running.assert_baseline)


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


@pytest.mark.slow
async def test_a_frozen_decode_worker_is_noticed(tmp_path):
    with fleet(tmp_path, "prefill-0", "decode-0") as running:
        decode = running.workers["decode-0"]
        async with streaming(running.url, chat(STORY, max_tokens=120), "disaggregated") as response:
            told, frozen_s, longest_s, last_s = "", 0.0, 0.0, time.monotonic()
            async for event in events(response):
                assert "error" not in event, "another worker goes on"
                now_s = time.monotonic()
                longest_s, last_s = max(longest_s, now_s - last_s), now_s
                told += "".join(c["delta"].get("content") or "" for c in event.get("choices", ()))
                if not frozen_s:
                    frozen_s = now_s
                    for pid in (decode.record.pid, decode.process.pid):
                        os.kill(pid, signal.SIGSTOP)
        assert 1.0 < longest_s < 10.0, "a pause, and no more"
        assert told == await text_of(running.url, chat(STORY, max_tokens=120), "colocated")
        for pid in (decode.record.pid, decode.process.pid):
            os.kill(pid, signal.SIGCONT)
        await soon(lambda: running.workers_shown()["decode-0"]["state"] == "ready")
        assert await text_of(running.url, chat("Hello", max_tokens=4), "disaggregated")
        await asyncio.to_thread(running.assert_baseline, 10.0)


@pytest.mark.slow
async def test_a_request_that_kills_workers_stops_after_two(tmp_path):
    poison = 28_000  # a token id that no other test's prompt holds
    with fleet(tmp_path, "decode-0", "decode-1", "decode-2", poison_token=poison) as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=30) as client:
            answer = await client.post(
                "/v1/completions", json={"model": NAME, "prompt": [1, 2, poison], "max_tokens": 4}
            )
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "poison_request"
        states = await soon(
            lambda: (
                (s := sorted(w["state"] for w in running.workers_shown().values())).count("dead")
                == 2
                and s
            )
        )
        assert states == ["dead", "dead", "ready"]
        assert await text_of(running.url, chat("Hello", max_tokens=4))
        await asyncio.to_thread(running.assert_baseline)


@pytest.mark.slow
async def test_no_worker_is_503(tmp_path):
    with fleet(tmp_path, "decode-0") as running:
        async with httpx.AsyncClient(base_url=running.url, timeout=10) as client:
            answer = await client.post(
                "/v1/chat/completions",
                json=chat("Hi", max_tokens=2),
                headers={"x-baton-mode": "disaggregated"},
            )
            assert answer.status_code == 503, "only auto falls back"
            assert "disaggregated" in answer.json()["error"]["message"]
            running.workers["decode-0"].kill()
            await soon(lambda: running.workers_shown()["decode-0"]["state"] == "dead")
            answer = await client.post("/v1/chat/completions", json=chat("Hi", max_tokens=2))
            assert answer.status_code == 503
            assert (await client.get("/health/live")).status_code == 200
            assert (await client.get("/health/ready")).status_code == 503


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param("flip:2", marks=pytest.mark.slow),
        pytest.param("replay:3", marks=pytest.mark.slow),
        pytest.param("swap:3", marks=pytest.mark.slow),
        pytest.param("incarnation:2", marks=pytest.mark.slow),
    ],
)
async def test_damaged_kv_is_never_shown(tmp_path, damage):
    with fleet(tmp_path, "prefill-0", "decode-0", damage=damage) as running:
        body = chat(LONG_PROMPT, max_tokens=12)
        handed_over = await text_of(running.url, body, "disaggregated")
        assert handed_over == await text_of(running.url, body, "colocated")
        metrics = httpx.get(f"http://{running.workers['decode-0'].record.metrics_address}/metrics")
        refused = [
            float(line.rsplit(" ", 1)[1])
            for line in metrics.text.splitlines()
            if line.startswith("baton_chunks_refused_total{")
        ]
        assert sum(refused) > 0, "frames were damaged"
        await asyncio.to_thread(running.assert_baseline)
