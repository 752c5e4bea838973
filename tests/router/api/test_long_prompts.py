"""Long prompts do not delay other requests: their work is in threads, and is not done twice."""

import asyncio
import threading

import pytest

from router.frontend.api import structured_output
from router.frontend.api.bodies import decimals
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.prepare import Preparer
from router.frontend.off_loop import LargeWork
from router.routing.placement import prompt_hashes
from tests.router.conftest import until
from tests.router.emulated_worker import Script

LONG = "international " * 5000  # 70 KB, and 5,000 of the 8,192 tokens of a context


@pytest.fixture
async def fleet(make_fleet):
    return await make_fleet({"decode-0": Script()})


async def test_a_short_request_is_answered_while_long_ones_wait_for_threads(fleet, monkeypatch):
    may_end = threading.Event()
    prepare = Preparer.chat

    def chat(preparer, body, *others):
        if len(body.messages[0].text("")) > 1000:
            may_end.wait(20)
        return prepare(preparer, body, *others)

    monkeypatch.setattr(Preparer, "chat", chat)
    long = [asyncio.create_task(fleet.chat(f"{number} {LONG}")) for number in range(12)]
    await asyncio.sleep(0.3)
    short = await asyncio.wait_for(fleet.chat("hi"), 10)
    waited = not any(task.done() for task in long)
    may_end.set()
    statuses = [(await task).status_code for task in long]
    assert (short.status_code, waited, statuses) == (200, True, [200] * 12)


async def test_a_long_prompt_is_hashed_in_a_thread_and_once(fleet, monkeypatch):
    threads: list[str] = []
    hashes = prompt_hashes._hashes

    def noted(seed, tokens):
        if len(tokens) > 1000:
            threads.append(threading.current_thread().name)
        return hashes(seed, tokens)

    monkeypatch.setattr(prompt_hashes, "_hashes", noted)
    assert (await fleet.chat("hi")).status_code == 200  # shows the format of the workers' KV
    assert (await fleet.chat(LONG)).status_code == 200
    assert (await fleet.complete(LONG, max_tokens=4)).status_code == 200
    assert len(threads) == 2
    assert all(name.startswith("large-body") for name in threads)


async def test_a_record_of_an_ended_request_holds_no_hashes(fleet):
    await fleet.chat("hi")
    await fleet.chat(LONG)
    kept = fleet.lane.gateway.kept
    await until(lambda: all(not active.request.prompt for active in kept.newest_first()))
    assert not any(active.request.chain for active in kept.newest_first())


async def test_a_body_without_a_grammar_has_two_turns_in_the_threads(fleet, monkeypatch):
    turns: list[int] = []
    run = LargeWork.run

    async def noted(large, size, work):
        turns.append(size)
        return await run(large, size, work)

    monkeypatch.setattr(LargeWork, "run", noted)
    await fleet.chat(LONG)
    assert len(turns) == 2
    await fleet.chat(LONG, response_format={"type": "json_object"})
    assert len(turns) == 5


def test_a_free_body_is_asked_for_no_field_beyond_those_that_request_a_grammar(model) -> None:
    asked: set[str] = set()

    class Watched(ChatBody):
        def __getattribute__(self, name: str) -> object:
            if name in ChatBody.model_fields:
                asked.add(name)
            return super().__getattribute__(name)

    body = Watched.model_validate({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    asked.clear()
    assert structured_output.requested_grammar(body, model) is None
    assert asked - {"tool_choice"} == set(structured_output._REQUESTS)


async def test_a_text_is_searched_for_decimals_only_beside_a_schema(fleet, monkeypatch):
    searched: list[int] = []

    class Search:
        def search(self, raw: bytes) -> None:
            searched.append(len(raw))

    monkeypatch.setattr(decimals, "_LONG", Search())
    monkeypatch.setattr(decimals, "_KEYWORDS", ("content",))
    await fleet.chat(LONG)
    assert not searched
    await fleet.chat(LONG, response_format={"type": "json_object"})
    assert searched
