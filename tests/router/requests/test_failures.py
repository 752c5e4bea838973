"""What clients see when things go wrong, with real gRPC, real HTTP, and real kills."""

import asyncio
import time

import pytest

from baton.config.clients import SloConfig
from tests.router.conftest import MODEL, events_of, until
from tests.router.emulated_worker import Script, answer_token

DISAGGREGATED = {"x-baton-mode": "disaggregated"}


async def kill(fleet, process) -> None:
    process.kill()
    await process.wait()


def only(fleet):
    return fleet.workers["decode-0"]


def text_of(model, count: int) -> str:
    return model.tokenizer.decode([answer_token(1, 0, i) for i in range(count)])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_is_cancelled_within_a_second(make_fleet, stream):
    fleet = await make_fleet({"decode-0": Script(step_s=0.05)})
    call = asyncio.create_task(fleet.chat(max_tokens=1000, stream=stream))
    await until(lambda: only(fleet).submissions)
    await asyncio.sleep(0.2)
    gone_s = time.monotonic()
    call.cancel()
    await until(lambda: only(fleet).cancels, timeout_s=1.0)
    assert time.monotonic() - gone_s < 1.0
    assert list(only(fleet).cancels[0].choices) == []
    await until(lambda: fleet.lane.gateway.in_flight == 0, timeout_s=2)
    assert fleet.lane.gateway.admission.running == 0


async def test_a_client_that_goes_away_before_the_first_token_is_cancelled(make_fleet):
    fleet = await make_fleet({"decode-0": Script(prefill_s=30)})
    call = asyncio.create_task(fleet.chat(stream=True))
    await until(lambda: only(fleet).submissions)
    call.cancel()
    await until(lambda: only(fleet).cancels, timeout_s=1.0)


async def test_the_deadline_is_504_before_the_first_token(make_fleet):
    fleet = await make_fleet({"decode-0": Script(prefill_s=30)})
    for stream in (False, True):
        response = await fleet.chat(stream=stream, headers={"x-baton-timeout-ms": "200"})
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
    await until(lambda: len(only(fleet).cancels) == 2)


async def test_the_deadline_is_an_event_on_a_stream_that_has_begun(make_fleet):
    fleet = await make_fleet({"decode-0": Script(step_s=0.05)})
    response = await fleet.chat(stream=True, max_tokens=500, headers={"x-baton-timeout-ms": "400"})
    assert response.status_code == 200
    events = events_of(response.text)
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in events


async def test_decode_death_in_the_middle_is_a_typed_error_within_two_seconds(make_fleet):
    fleet = await make_fleet({})
    process = await fleet.spawn("decode-0", "--step-s", "0.05")
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "max_tokens": 1000,
    }
    lines = []
    async with fleet.http.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if len(lines) == 10:
                process.kill()
                killed_s = time.monotonic()
    assert time.monotonic() - killed_s < 2.0
    events = events_of("\n".join(lines))
    assert events[-1]["error"]["code"] == "worker_lost"
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert (await fleet.http.get("/health/live")).status_code == 200
    slot = (await fleet.http.get("/fleet")).json()["workers"][0]
    assert slot["state"] == "dead"
    assert slot["kv_blocks"] == dict.fromkeys(slot["kv_blocks"], 0)
    assert (slot["running"], slot["pid"], slot["threads"], slot["age_s"]) == (0, 0, 0, None)


async def test_death_before_anything_was_sent_moves_the_request(make_fleet, model):
    fleet = await make_fleet({})
    process = await fleet.spawn("decode-0", "--prefill-s", "30")
    call = asyncio.create_task(fleet.chat(stream=True))
    await until(lambda: fleet.lane.gateway.in_flight == 1)
    await fleet.add("decode-1", Script(step_s=0.001))
    await asyncio.sleep(0.1)
    await kill(fleet, process)
    response = await call
    assert response.status_code == 200
    assert "decode=decode-1" in response.headers["x-baton-route"]
    assert fleet.workers["decode-1"].submissions[0].attempt == 2
    pieces = [e["choices"][0]["delta"].get("content", "") for e in events_of(response.text)[:-1]]
    assert "".join(pieces) == text_of(model, 4)


async def test_a_whole_answer_moves_even_after_tokens_came(make_fleet, model):
    fleet = await make_fleet({})
    process = await fleet.spawn("decode-0", "--step-s", "0.05")
    call = asyncio.create_task(fleet.chat(max_tokens=20))
    await asyncio.sleep(0.4)
    await fleet.add("decode-1", Script(step_s=0.001))
    await kill(fleet, process)
    response = await call
    assert response.json()["choices"][0]["message"]["content"] == text_of(model, 20)


SIXTY_TOKENS = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "max_tokens": 60,
    "seed": 1,
}


class TestAnAnswerGoesOn:
    """Its decode worker is lost or leaves; the client sees the same answer, after a pause."""

    @staticmethod
    async def stream(fleet, after_events: int, then, **body) -> list:
        """The events of a stream; ``then`` is called behind that many of them."""
        lines = []
        async with fleet.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                lines.append(line)
                if len(lines) == 2 * after_events:  # each is a line and an empty one
                    await then()
        return events_of("\n".join(lines))

    @staticmethod
    def texts(events: list, n: int = 1) -> list[str]:
        assert events[-1] == "[DONE]"
        texts = [""] * n
        for event in events[:-1]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["delta"].get("content", "")
        return texts

    async def test_after_a_kill_in_the_middle(self, make_fleet, model):
        fleet = await make_fleet({})
        process = await fleet.spawn("decode-0", "--step-s", "0.02")

        async def then():
            await fleet.add("decode-1", Script(step_s=0.001))
            await kill(fleet, process)

        events = await self.stream(fleet, 8, then, **SIXTY_TOKENS)
        assert self.texts(events) == [text_of(model, 60)]
        (submission,) = fleet.workers["decode-1"].submissions
        assert submission.attempt == 2
        assert len(submission.emitted[0].token_ids) >= 4 * 6
        page = (await fleet.http.get("/metrics")).text
        assert 'baton_migrations_total{reason="worker lost"} 1.0' in page
        story = (await fleet.http.get(f"/fleet/requests/{events[0]['id']}")).json()
        assert story["moves"] == ["worker lost"]

    async def test_choices_logprobs_and_usage_after_a_kill(self, make_fleet, model):
        fleet = await make_fleet({})
        process = await fleet.spawn("decode-0", "--step-s", "0.02")

        async def then():
            await fleet.add("decode-1", Script(step_s=0.001))
            await kill(fleet, process)

        asked = {"n": 2, "logprobs": True, "stream_options": {"include_usage": True}}
        events = await self.stream(fleet, 12, then, **SIXTY_TOKENS, **asked)
        ids = [[answer_token(1, choice, i) for i in range(60)] for choice in (0, 1)]
        assert self.texts(events, 2) == [model.tokenizer.decode(each) for each in ids]
        shown = [0, 0]
        for event in events[:-1]:
            for choice in event["choices"]:
                shown[choice["index"]] += len((choice["logprobs"] or {"content": []})["content"])
        assert shown == [60, 60]
        assert events[-2]["usage"]["completion_tokens"] == 120

    async def test_a_stop_string_across_the_move(self, make_fleet, model):
        """Half of it comes from one worker, half from the other."""
        fleet = await make_fleet({})
        process = await fleet.spawn("decode-0", "--step-s", "0.02")
        whole = text_of(model, 60)
        stop = model.tokenizer.decode([answer_token(1, 0, i) for i in range(20, 50)])

        async def then():
            record = next(iter(fleet.lane.gateway.active.values())).record
            await until(lambda: record.choices[0].next_index >= 25)  # held: nothing is sent now
            await fleet.add("decode-1", Script(step_s=0.001))
            await kill(fleet, process)

        events = await self.stream(fleet, 8, then, **SIXTY_TOKENS, stop=[stop])
        assert self.texts(events) == [whole[: whole.index(stop)]]
        assert events[-2]["choices"][0]["finish_reason"] == "stop"

    async def test_a_choice_that_has_ended_is_not_asked_for_again(self, make_fleet, model):
        fleet = await make_fleet({})
        process = await fleet.spawn("decode-0", "--step-s", "0.02")
        own = model.tokenizer.decode([answer_token(1, 1, i) for i in range(3, 6)])

        async def then():
            await fleet.add("decode-1", Script(step_s=0.001))
            await kill(fleet, process)

        events = await self.stream(fleet, 24, then, **SIXTY_TOKENS, n=2, stop=[own])
        (submission,) = fleet.workers["decode-1"].submissions
        assert [choice.finish_reason for choice in submission.emitted] == ["", "stop"]
        assert self.texts(events, 2)[0] == text_of(model, 60)

    async def test_when_its_worker_leaves(self, make_fleet, model):
        fleet = await make_fleet({"decode-0": Script(step_s=0.05)})

        async def then():
            await fleet.add("decode-1", Script(step_s=0.001))
            only(fleet).state = "draining"

        events = await self.stream(fleet, 8, then, **SIXTY_TOKENS)
        assert self.texts(events) == [text_of(model, 60)]
        assert only(fleet).cancels  # the one that leaves is told
        page = (await fleet.http.get("/metrics")).text
        assert 'baton_migrations_total{reason="worker leaving"} 1.0' in page

    async def test_it_stays_where_all_workers_leave_one_after_the_other(self, make_fleet, model):
        fleet = await make_fleet({"decode-0": Script(step_s=0.05)})

        async def then():
            other = await fleet.add("decode-1", Script(step_s=0.001))
            only(fleet).state = "draining"
            await asyncio.sleep(0.3)
            other.state = "draining"

        events = await self.stream(fleet, 8, then, **SIXTY_TOKENS)
        assert self.texts(events) == [text_of(model, 60)]
        assert not only(fleet).cancels
        assert not fleet.workers["decode-1"].submissions

    async def test_it_stays_where_nobody_else_could_take_it(self, make_fleet, model):
        fleet = await make_fleet({"decode-0": Script(step_s=0.01)})

        async def then():
            only(fleet).state = "draining"

        events = await self.stream(fleet, 8, then, **SIXTY_TOKENS)
        assert self.texts(events) == [text_of(model, 60)]
        assert not only(fleet).cancels

    async def test_two_deaths_end_it(self, make_fleet):
        fleet = await make_fleet({})
        first = await fleet.spawn("decode-0", "--step-s", "0.02")
        second = []

        async def then():
            second.append(await fleet.spawn("decode-1", "--step-s", "0.02"))
            await fleet.add("decode-2")
            fleet.workers["decode-2"].state = "draining"  # in reserve
            await until(lambda: fleet.state("decode-2") == "draining")
            await kill(fleet, first)
            gateway = fleet.lane.gateway
            active = next(iter(gateway.active.values()))
            await until(lambda: active.record.attempt == 2 and not active.record._pauses)
            fleet.workers["decode-2"].state = "ready"
            await until(lambda: fleet.state("decode-2") == "ready")
            await kill(fleet, second[0])

        # Longer than it takes to start a worker.
        events = await self.stream(fleet, 8, then, **{**SIXTY_TOKENS, "max_tokens": 1500})
        assert events[-1]["error"]["code"] == "poison_request"
        assert not fleet.workers["decode-2"].submissions


async def test_a_request_that_kills_workers_stops_after_two(make_fleet):
    fleet = await make_fleet({})
    processes = [
        await fleet.spawn(f"decode-{i}", "--die-at-index", "0", "--prefill-s", "0.1")
        for i in range(3)
    ]
    response = await fleet.chat()
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "poison_request"
    await asyncio.sleep(0.1)
    assert [process.returncode is None for process in processes].count(True) == 1
    page = (await fleet.http.get("/metrics")).text
    assert "baton_poison_requests_total 1.0" in page


async def test_death_without_another_worker_is_503(make_fleet):
    fleet = await make_fleet({})
    process = await fleet.spawn("decode-0", "--prefill-s", "30")
    call = asyncio.create_task(fleet.chat())
    await until(lambda: fleet.lane.gateway.in_flight == 1)
    await asyncio.sleep(0.1)
    await kill(fleet, process)
    response = await call
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "worker_lost"


async def test_a_hung_worker_is_dead_after_two_seconds(make_fleet):
    fleet = await make_fleet({"decode-0": None, "decode-1": None}, silence_s=0.6)
    only(fleet).script.hang = True
    await until(lambda: fleet.state("decode-0") == "dead", timeout_s=2)
    assert (await fleet.chat()).headers["x-baton-route"].startswith("prefill=decode-1")
    only(fleet).script.hang = False
    await until(lambda: fleet.state("decode-0") == "ready", timeout_s=5)


async def test_two_silent_workers_are_no_query_of_death(make_fleet):
    """Defect 8: two stalls of two seconds were a 500 that nobody may retry."""
    slow = {"prefill_s": 30}
    fleet = await make_fleet(
        {"decode-0": Script(**slow), "decode-1": Script(**slow)}, silence_s=0.5
    )
    call = asyncio.create_task(fleet.chat())
    for attempt in (1, 2):
        await until(
            lambda attempt=attempt: [
                submission
                for worker in fleet.workers.values()
                for submission in worker.submissions
                if submission.attempt == attempt
            ]
        )
        holder = next(w for w in fleet.workers.values() if w.submissions and not w.script.hang)
        holder.script.hang = True
    response = await call
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "worker_lost"
    assert "baton_poison_requests_total 1.0" not in (await fleet.http.get("/metrics")).text


async def test_a_router_that_stood_still_does_not_blame_its_workers(make_fleet, caplog):
    fleet = await make_fleet({"decode-0": None}, silence_s=0.6)
    for _ in range(3):
        time.sleep(1.0)  # noqa: ASYNC251 - this is what it is about
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    assert "dead" not in caplog.text
    assert (await fleet.chat()).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_broken_stream_is_resumed_without_duplicates(make_fleet, model, stream):
    fleet = await make_fleet({"decode-0": Script(step_s=0.02, cut_stream_at=5)})
    response = await fleet.chat(max_tokens=30, n=2, stream=stream)
    if stream:
        texts = {0: "", 1: ""}
        for event in events_of(response.text)[:-1]:
            choice = event["choices"][0]
            texts[choice["index"]] += choice["delta"].get("content", "")
    else:
        choices = response.json()["choices"]
        texts = {choice["index"]: choice["message"]["content"] for choice in choices}
    assert texts[0] == text_of(model, 30)
    assert len(only(fleet).resumes) == 1
    assert len(only(fleet).submissions) == 1


async def test_a_lost_token_is_asked_for(make_fleet, model):
    fleet = await make_fleet({"decode-0": Script(step_s=0.01, skip_index=3)})
    response = await fleet.chat(max_tokens=10)
    assert response.json()["choices"][0]["message"]["content"] == text_of(model, 10)
    assert list(only(fleet).resumes[0].next_index) == [3]


async def test_worker_errors_keep_their_status(make_fleet):
    for code, status in [("numerics_error", 500), ("transfer_failed", 503), ("no_such", 500)]:
        fleet = await make_fleet({"decode-0": Script(fail=(code, "because", False))})
        response = await fleet.chat(stream=True)
        assert response.status_code == status
        assert "because" in response.json()["error"]["message"]


async def test_a_retryable_refusal_is_tried_on_another_worker(make_fleet, model):
    refusing = Script(fail=("unavailable", "draining", True))
    fleet = await make_fleet({"decode-0": refusing, "decode-1": refusing})
    fleet.workers["decode-1"].script = Script()
    for _ in range(4):
        assert (await fleet.chat()).status_code == 200


async def test_no_worker_and_unmet_modes_are_503_with_the_reason(make_fleet):
    fleet = await make_fleet({})
    response = await fleet.chat()
    assert response.status_code == 503
    assert "no worker is ready" in response.json()["error"]["message"]
    await fleet.add("decode-0")
    response = await fleet.chat(headers={"x-baton-mode": "disaggregated"})
    assert response.status_code == 503
    assert "no prefill worker" in response.json()["error"]["message"]
    for mode in ("auto", "colocated"):
        assert (await fleet.chat(headers={"x-baton-mode": mode})).status_code == 200


async def test_a_draining_worker_gets_nothing_new(make_fleet):
    fleet = await make_fleet({"decode-0": None, "decode-1": None})
    only(fleet).state = "draining"
    await until(lambda: fleet.state("decode-0") == "draining")
    for _ in range(5):
        assert (await fleet.chat()).status_code == 200
    assert not only(fleet).submissions


class TestPrefillRepair:
    """The decode worker lost its prefill worker."""

    async def test_another_prefill_worker_replaces_it(self, make_fleet):
        broken = Script(need_prefill=True)
        fleet = await make_fleet({"decode-0": broken, "prefill-0": None, "prefill-1": None})
        response = await fleet.chat(headers=DISAGGREGATED)
        assert response.status_code == 200
        first = only(fleet).submissions[0].prefill.worker_id
        second = only(fleet).replacements[0].prefill.worker_id
        assert {first, second} == {"prefill-0", "prefill-1"}
        assert f"prefill={second}" in response.headers["x-baton-route"]

    async def test_auto_falls_back_to_local_when_the_peer_lives(self, make_fleet):
        # A busy decode worker and a prefill worker that decodes badly: the pair is cheapest.
        script = Script(need_prefill=True, peer_died=False, streams=50)
        fleet = await make_fleet({"decode-0": script, "prefill-0": Script(decode_step_s=5.0)})
        response = await fleet.chat()
        assert response.status_code == 200
        assert "mode=colocated" in response.headers["x-baton-route"]
        assert only(fleet).replacements[0].compute_locally
        page = (await fleet.http.get("/metrics")).text
        assert 'baton_fallbacks_total{reason="local prefill"} 1.0' in page

    async def test_disaggregated_never_falls_back(self, make_fleet):
        script = Script(need_prefill=True, peer_died=False)
        fleet = await make_fleet({"decode-0": script, "prefill-0": None})
        response = await fleet.chat(headers=DISAGGREGATED)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "transfer_failed"
        await until(lambda: only(fleet).replacements)
        assert only(fleet).replacements[0].refuse.code == "transfer_failed"

    async def test_after_a_crash_it_waits_for_a_new_life(self, make_fleet):
        fleet = await make_fleet({"decode-0": Script(need_prefill=True), "prefill-0": None})
        call = asyncio.create_task(fleet.chat(headers=DISAGGREGATED))
        await until(lambda: only(fleet).submissions)
        await fleet.workers["prefill-0"].stop()
        await until(lambda: fleet.state("prefill-0") == "dead")
        await fleet.add("prefill-0")
        assert (await call).status_code == 200
        new_life = fleet.workers["prefill-0"].incarnation
        assert only(fleet).replacements[0].prefill.incarnation == new_life

    async def test_it_waits_no_longer_than_it_may(self, make_fleet):
        fleet = await make_fleet(
            {"decode-0": Script(need_prefill=True), "prefill-0": None}, repair_wait_s=0.3
        )
        response = await fleet.chat(headers=DISAGGREGATED)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "transfer_failed"


class TestAdmission:
    """The queue in front of the workers."""

    async def test_a_full_queue_is_429_with_an_honest_retry_after(self, make_fleet):
        fleet = await make_fleet(
            {"decode-0": Script(step_s=0.02)}, window_requests=1, max_queued_requests=3
        )
        calls = [asyncio.create_task(fleet.chat(max_tokens=10)) for _ in range(12)]
        responses = await asyncio.gather(*calls)
        codes = sorted(response.status_code for response in responses)
        assert codes == [200] * 4 + [429] * 8
        refused = next(r for r in responses if r.status_code == 429)
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 20

    async def test_lower_priority_numbers_run_first(self, make_fleet):
        fleet = await make_fleet({"decode-0": Script(step_s=0.02)}, window_requests=1)
        calls = []
        for priority in (0, 5, -5, 0):
            calls.append(asyncio.create_task(fleet.chat(max_tokens=5, priority=priority)))
            await asyncio.sleep(0.02)
        await asyncio.gather(*calls)
        assert [s.priority for s in only(fleet).submissions] == [0, -5, 0, 5]

    async def test_a_deadline_passes_in_the_queue_too(self, make_fleet):
        fleet = await make_fleet({"decode-0": Script(step_s=0.1)}, window_requests=1)
        first = asyncio.create_task(fleet.chat(max_tokens=10))
        await until(lambda: only(fleet).submissions)
        late = await fleet.chat(headers={"x-baton-timeout-ms": "100"})
        assert late.status_code == 504
        assert (await first).status_code == 200
        assert len(only(fleet).submissions) == 1
        assert fleet.lane.gateway.admission.waiting == 0


class TestFaultsOfOurOwn:
    """A fault inside the router ends the request that it is in, and nothing else."""

    async def test_a_streamed_call_of_many_prompts_runs_through_a_narrow_window(self, make_fleet):
        fleet = await make_fleet({"decode-0": Script(step_s=0.01)}, window_requests=1)
        response = await fleet.complete(["a", "b", "c"], stream=True, max_tokens=3)
        events = events_of(response.text)
        assert events[-1] == "[DONE]"
        ends = [e["choices"][0] for e in events[:-1] if e["choices"][0]["finish_reason"]]
        assert [end["index"] for end in ends] == [0, 1, 2]
        assert (await fleet.chat()).status_code == 200

    @pytest.mark.parametrize("slo", [None, SloConfig(ttft_s=10, itl_s=1)])
    async def test_a_placement_that_fails_frees_its_place(self, make_fleet, monkeypatch, slo):
        fleet = await make_fleet({"decode-0": None}, window_requests=1, slo=slo)
        gateway = fleet.lane.gateway
        quote = gateway.placer.quote
        faults = [OverflowError("too large")] * (1 if slo is None else 2)  # the gate asks, too

        def broken(active, avoid=b""):
            if faults:
                raise faults.pop()
            return quote(active, avoid)

        monkeypatch.setattr(gateway.placer, "quote", broken)
        response = await fleet.chat()
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert (gateway.admission.running, gateway.in_flight) == (0, 0)
        assert (await fleet.chat()).status_code == 200

    async def test_tokens_that_cannot_be_handled_end_only_their_request(self, make_fleet):
        fleet = await make_fleet({"decode-0": Script(bad_seed=7, step_s=0.02)})
        good = asyncio.create_task(fleet.chat(max_tokens=9))
        await until(lambda: only(fleet).jobs)
        assert (await fleet.chat(seed=7)).status_code == 500
        assert (await good).status_code == 200

    async def test_a_frame_that_cannot_be_handled_kills_the_link_and_it_comes_back(
        self, make_fleet, monkeypatch, caplog
    ):
        fleet = await make_fleet({"decode-0": None})
        table = fleet.lane.gateway.workers
        faults = [KeyError("a fault of ours")]
        note_transfers = table.note_transfers

        def broken(link, totals):
            if faults:
                raise faults.pop()
            note_transfers(link, totals)

        monkeypatch.setattr(table, "note_transfers", broken)
        await until(lambda: fleet.state("decode-0") == "dead")
        await until(lambda: fleet.state("decode-0") == "ready")
        assert "a fault of ours" in caplog.text
        assert (await fleet.chat()).status_code == 200


async def test_a_submission_that_seems_lost_is_cancelled_before_it_goes_elsewhere(make_fleet):
    fleet = await make_fleet(
        {"decode-0": Script(lose_ack=True, prefill_s=30)}, unary_prompt_bytes=64
    )
    call = asyncio.create_task(fleet.complete("hi " * 40))
    await fleet.add("decode-1")
    assert (await call).status_code in (200, 503)
    await until(lambda: only(fleet).cancels)
    assert only(fleet).cancels[0].attempt == 1
