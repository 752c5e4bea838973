"""A bad or expensive grammar is a 400 for one client, and nothing else."""

import asyncio
import json
from functools import partial

import pytest

from baton.telemetry.metrics import Metrics
from baton.text.grammar import MAX_SOURCE_CHARACTERS
from baton.text.grammar_check import Question, TriedGrammar
from baton.types.errors import GrammarError, UnavailableError
from router.routing.checks.grammars import GrammarChecker
from tests.router.conftest import until
from tests.router.emulated_worker import Script
from tests.telemetry.values import value_of

DEEP = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(2500)) + '\nr2500: "b"'
# Each part doubles what llguidance builds: 10 take 300 to 800 ms, and 11 are rejected after 30 ms.
SLOW = json.dumps(
    {
        "allOf": [
            {"anyOf": [{"type": "object", "required": [f"{side}{i}"]} for side in "ab"]}
            for i in range(10)
        ]
    }
)


@pytest.fixture(scope="module")
def vocabulary(model):
    return model.vocabulary()


@pytest.fixture
async def make_checker(vocabulary):
    made = []

    def make(**fields) -> GrammarChecker:
        made.append(GrammarChecker(lambda: vocabulary, Metrics("router", model="m"), **fields))
        return made[-1]

    yield make
    for checker in made:
        await checker.close()


async def test_a_good_one_comes_back_as_a_grammar_and_is_tried_once(make_checker):
    checker = make_checker()
    first = await checker.check("guided_regex", "regex", "a+")
    process = checker._process._process
    assert "a+" in first
    await checker.close()
    assert process.returncode is not None
    assert await checker.check("guided_regex", "regex", "a+") == first
    assert checker._process._process is None, "what was tried before needs no process"


async def test_one_that_kills_the_compiler_is_refused_and_the_next_is_served(make_checker):
    checker = make_checker()
    with pytest.raises(GrammarError, match=r"guided_grammar: too expensive.*nested") as caught:
        await checker.check("guided_grammar", "grammar", DEEP)
    assert caught.value.param == "guided_grammar"
    assert checker._process._process is None
    assert await checker.check("guided_choice", "choice", '["a"]')
    with pytest.raises(GrammarError, match="nested"):
        await checker.check("guided_grammar", "grammar", DEEP)
    assert checker._process._process is not None, "it was remembered, not tried again"
    refusals = value_of(checker._metrics, "baton_grammar_refusals", reason="too_expensive")
    assert refusals == 2


async def test_a_process_that_died_between_two_is_no_fault_of_the_second(make_checker):
    """It was blamed as too expensive, for as long as the router ran; uvloop made it a 500."""
    checker = make_checker()
    await checker.check("guided_regex", "regex", "a+")
    checker._process._process.kill()
    await checker._process._process.wait()
    assert "b+" in await checker.check("guided_regex", "regex", "b+")


async def test_a_compiler_that_is_killed_from_outside_is_no_fault_of_its_grammar(make_checker):
    checker = make_checker(limit_s=60.0)
    await checker.check("guided_choice", "choice", '["a"]')
    compiler = checker._process._process
    trial = asyncio.create_task(checker.check("response_format", "json", SLOW))
    await asyncio.sleep(0.1)
    compiler.kill()
    with pytest.raises(UnavailableError, match="killed; try again"):
        await trial
    assert await checker.check("response_format", "json", SLOW)


async def test_one_that_takes_too_long_is_refused_and_the_next_is_served(make_checker):
    checker = make_checker(limit_s=0.05)
    await checker.check("guided_choice", "choice", '["a"]')
    with pytest.raises(GrammarError, match=r"over 0\.05 s to compile"):
        await checker.check("response_format", "json", SLOW)
    checker._limit_s = 5.0
    assert await checker.check("guided_choice", "choice", '["b"]')
    with pytest.raises(GrammarError, match="over 0 s"):
        checker._limit_s = 0
        await checker.check("guided_regex", "regex", "a+")
    checker._limit_s = 5.0
    assert await checker.check("guided_regex", "regex", "a+"), (
        "a busy machine is not held against it"
    )


async def test_tenants_take_turns_and_a_full_line_is_the_tenants_own(make_checker, monkeypatch):
    checker, order = make_checker(), []

    async def tried(question: Question) -> TriedGrammar:
        order.append(question.source)
        await asyncio.sleep(0)
        return TriedGrammar(grammar="g")

    monkeypatch.setattr(checker, "_try", tried)
    many = [checker.check("guided_regex", "regex", f"a{i}", "busy") for i in range(300)]
    one = checker.check("guided_regex", "regex", "b", "other")
    *busy, other = await asyncio.gather(*many, one, return_exceptions=True)
    assert order.index("b") == 1
    assert other == "g"
    assert sum(isinstance(outcome, UnavailableError) for outcome in busy) == 300 - 257
    assert not checker._limit._tenants


async def test_a_process_that_does_not_start_is_no_fault_of_the_grammar(vocabulary, make_checker):
    checker = make_checker()
    checker._vocabulary = lambda: "not a vocabulary"
    with pytest.raises(UnavailableError, match="does not start"):
        await checker.check("guided_regex", "regex", "a+")
    checker._vocabulary = lambda: vocabulary
    assert await checker.check("guided_regex", "regex", "a+")


async def test_a_caller_that_cannot_wait_costs_no_other_anything(make_checker):
    """It may leave while its grammar is tried, or while it still stands in the line."""
    checker = make_checker(limit_s=20)
    await checker.check("guided_choice", "choice", '["a"]')
    process = checker._process._process
    tried = asyncio.create_task(checker.check("response_format", "json", SLOW, "one"))
    waiting = asyncio.create_task(checker.check("guided_regex", "regex", "b+", "two"))
    await asyncio.sleep(0.02)
    for gone in (tried, waiting):
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
    assert "[0-9]" in await checker.check("guided_regex", "regex", "[0-9]")
    assert checker._process._process is process, "it goes on, and nobody waits for a new one"
    known = {question.source for question in checker._known}
    assert SLOW in known
    assert "b+" not in known, "nobody waits for it"
    assert not checker._limit._tenants


async def test_the_router_closes_while_a_grammar_is_tried(make_checker):
    checker = make_checker()
    await checker.check("guided_choice", "choice", '["a"]')
    process = checker._process._process
    tried = asyncio.create_task(checker.check("response_format", "json", SLOW))
    await asyncio.sleep(0.02)
    await checker.close()
    assert process.returncode is not None
    with pytest.raises(asyncio.CancelledError):
        await tried


async def test_the_callers_deadline_cuts_the_wait(make_fleet, monkeypatch):
    fleet, may_end = await make_fleet({"decode-0": Script()}), asyncio.Event()

    async def tried(question: Question) -> TriedGrammar:
        await may_end.wait()
        return TriedGrammar(grammar="g")

    monkeypatch.setattr(fleet.lane.grammars, "_try", tried)
    slow = asyncio.create_task(fleet.chat(guided_regex="a+"))
    for tenant in ("default", "other"):
        headers = {"x-baton-timeout-ms": "50", "x-baton-tenant": tenant}
        answer = await fleet.chat(guided_regex="b+", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert "took longer than 0.05 s" in answer.json()["error"]["message"]
    may_end.set()
    assert (await slow).status_code == 200
    assert len(fleet.workers["decode-0"].submissions) == 1
    assert value_of(fleet.router.metrics, "baton_timeouts", phase="grammar") == 2


REFUSED = [
    ({"guided_json": {"type": "bogus"}}, "guided_json", "Invalid type: bogus"),
    ({"guided_json": "nonsense"}, "guided_json", "Expecting value"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ({"guided_grammar": "start: b"}, "guided_grammar", "unknown name"),
    ({"guided_grammar": 'root ::= "a'}, "guided_grammar", "at line 1"),
    ({"guided_regex": "x" * (MAX_SOURCE_CHARACTERS + 1)}, "guided_regex", "the limit is 262144"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed"),
    ({"guided_choice": []}, "guided_choice", "at least 1 item"),
    (
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "response_format",
        "guided_regex and response_format",
    ),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "is required",
    ),
    (
        {"guided_json": {"items": {"uniqueItems": True}}},
        "guided_json",
        "uniqueItems at #/items/uniqueItems",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
]


async def test_refused_by_name_before_admission(make_fleet):
    fleet = await make_fleet({"decode-0": Script()})
    for body, param, message in REFUSED:
        answer = await fleet.chat(**body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert message in error["message"]
        assert error["type"] == "invalid_request_error"
    assert not fleet.workers["decode-0"].submissions


async def test_the_grammar_travels_with_the_request(make_fleet):
    fleet = await make_fleet({"decode-0": Script()})
    answer = await fleet.complete(response_format={"type": "json_object"})
    assert answer.status_code == 200
    [submission] = fleet.workers["decode-0"].submissions
    assert '"type": "object"' in submission.sampling.grammar
    assert (await fleet.complete(response_format={"type": "text"})).status_code == 200
    assert fleet.workers["decode-0"].submissions[-1].sampling.grammar == ""
    shown = (await fleet.http.get("/metrics")).text
    assert "baton_grammar_compile_seconds_count" in shown


async def test_a_fault_of_ours_is_counted_and_told_and_the_next_grammar_is_tried(
    make_checker, monkeypatch
):
    checker = make_checker()
    monkeypatch.setattr(checker, "_try", lambda question: asyncio.sleep(0, 1 / 0))
    with pytest.raises(ZeroDivisionError):
        await checker.check("guided_regex", "regex", "a+")
    await until(lambda: value_of(checker._metrics, "baton_task_failures", task="grammar") == 1)
    monkeypatch.undo()
    assert await checker.check("guided_regex", "regex", "a+")
    assert value_of(checker._metrics, "baton_task_failures", task="grammar") == 1


async def test_grammars_of_clients_that_have_left_are_not_tried(make_fleet, monkeypatch):
    """A client that left kept its place for minutes, and its tenant's 256 places were soon full."""
    fleet = await make_fleet({"decode-0": Script()})
    grammars = fleet.lane.grammars
    assert (await fleet.chat(guided_regex="a+")).status_code == 200  # the process is there
    tried, goes_on, whole = [], asyncio.Event(), grammars._try

    async def slowly(question):
        tried.append(question.source)
        await goes_on.wait()
        return await whole(question)

    monkeypatch.setattr(grammars, "_try", slowly)
    calls = [asyncio.create_task(fleet.chat(guided_regex=f"b{{{n}}}")) for n in range(1, 9)]
    queues = grammars._limit._tenants
    await until(lambda: sum(tenant.waiting for tenant in queues.values()) == 7)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await until(lambda: not sum(tenant.waiting for tenant in queues.values()), 3)
    goes_on.set()
    assert (await fleet.chat(guided_regex="c+")).status_code == 200
    assert len(tried) == 2  # the one that was being tried, and the last
    count = partial(value_of, fleet.router.metrics)
    assert count("baton_requests", endpoint="chat", status="499", tenant="all") == 8
    assert len(fleet.workers["decode-0"].submissions) == 2


async def test_a_client_that_left_before_its_call_is_prepared_starts_nothing(
    make_fleet, monkeypatch
):
    from router.frontend.api import generation

    fleet = await make_fleet({"decode-0": Script()})
    whole, held = generation.off_loop, asyncio.Event()

    async def slowly(size, work):
        await asyncio.sleep(0)
        await held.wait()
        return await whole(size, work)

    monkeypatch.setattr(generation, "off_loop", slowly)
    call = asyncio.create_task(fleet.chat())
    await until(lambda: fleet.server.server_state.connections)
    await asyncio.sleep(0.2)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await asyncio.sleep(0.2)
    held.set()
    await asyncio.sleep(0.3)
    monkeypatch.undo()
    assert fleet.workers["decode-0"].submissions == []
    assert (await fleet.chat()).status_code == 200


async def test_verdicts_on_long_grammars_are_bounded_by_their_characters(make_checker):
    checker = make_checker()
    for number in range(300):
        question = Question("grammar", f"{number:06d}" + "a" * 200_000)
        checker._keep(question, TriedGrammar(error="made up"))
    characters = [len(q.source) + len(v.error) for q, v in checker._known.items()]
    assert 70 < len(characters) < 90
    assert sum(characters) == checker._known_characters <= 16 << 20
    assert list(checker._known)[-1].source.startswith("000299")
