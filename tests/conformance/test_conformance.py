"""Every answer and every event follows its specification, except for the listed deviations."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.conformance import order, specifications
from tests.conformance.answers import DONE, Answer, Event, recording
from tests.conformance.cases import (
    BASE,
    CASES,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    WHOLE,
)
from tests.conformance.deviations import DEVIATIONS
from tests.conformance.judge import Finding
from tests.conformance.play import play


class Judged(NamedTuple):
    """Difference between an answer and its specification."""

    call: str
    case: str
    event: str
    finding: Finding


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    """All answers of one router."""

    async def record() -> list[Answer]:
        async for recorder in recording():
            await play(recorder)
        return recorder.answers

    return asyncio.run(record())


@pytest.fixture(scope="module")
def judged(answers: list[Answer]) -> list[Judged]:
    """All differences."""
    return [found for answer in answers for found in _judged(answer)]


def _judged(answer: Answer) -> Iterator[Judged]:
    for name, value in answer.events:
        if value == DONE:
            continue
        if answer.status >= 400 or (answer.is_stream and _is_error(name, value)):
            findings = specifications.of_error(answer.call, value)
        elif name == "ping":
            findings = specifications.of_ping(value)
        else:
            findings = specifications.of_answer(answer.call, answer.content_type, value)
        for finding in findings:
            yield Judged(answer.call, answer.case, name, finding)


def _is_error(name: str, value: dict[str, object]) -> bool:
    return name == "error" or set(value) == {"error"}


def test_every_difference_is_a_listed_deviation(judged: list[Judged]) -> None:
    unlisted = [
        found
        for found in judged
        if not any(
            deviation.covers(found.call, at, found.finding)
            for deviation in DEVIATIONS
            for at in deviation.at
        )
    ]
    assert unlisted == []


def test_every_listed_deviation_occurs(judged: list[Judged]) -> None:
    gone = [
        (deviation.calls, at)
        for deviation in DEVIATIONS
        for at in deviation.at
        if not any(deviation.covers(found.call, at, found.finding) for found in judged)
    ]
    assert gone == []


def test_every_stream_has_its_events_in_order(answers: list[Answer]) -> None:
    streams = [answer for answer in answers if answer.is_stream]
    assert {answer.call for answer in streams} == {CHAT, COMPLETIONS, RESPONSES, MESSAGES}
    for answer in streams:
        order.check(answer)


@pytest.mark.parametrize("call", [RESPONSES, MESSAGES])
def test_a_missing_or_repeated_event_is_found(answers: list[Answer], call: str) -> None:
    stream = _stream(answers, call, "text and two calls, streamed")
    for at, event in enumerate(stream.events):
        if event.name == "content_block_delta":  # its text is nowhere else
            continue
        for count in (0, 2):
            events = [*stream.events[:at], *[event] * count, *stream.events[at + 1 :]]
            with pytest.raises(order.OrderError):
                order.check(replace(stream, events=_numbered(events)))


@pytest.mark.parametrize("call", [CHAT, COMPLETIONS])
def test_a_missing_end_is_found(answers: list[Answer], call: str) -> None:
    stream = _stream(answers, call, "two choices, streamed")
    ends = {len(stream.events) - 1} | {
        at
        for at, event in enumerate(stream.events[:-1])
        if event.value["choices"][0]["finish_reason"]
    }
    assert len(ends) == 3
    for at in ends:
        events = (*stream.events[:at], *stream.events[at + 1 :])
        with pytest.raises(order.OrderError):
            order.check(replace(stream, events=events))


def _stream(answers: list[Answer], call: str, case: str) -> Answer:
    return next(answer for answer in answers if (answer.call, answer.case) == (call, case))


def _numbered(events: list[Event]) -> tuple[Event, ...]:
    """The same events; those of Responses with new numbers."""
    values: list[Any] = [dict(event.value) for event in events]
    for number, value in enumerate(values):
        if "sequence_number" in value:
            value["sequence_number"] = number
    pairs = zip(events, values, strict=True)
    return tuple(Event(event.name, value) for event, value in pairs)


def test_the_answers_have_every_form(answers: list[Answer]) -> None:
    """No judgement is passed because nothing happened."""
    given = {(answer.call, answer.case): answer for answer in answers}
    for call, cases in CASES.items():
        for case in cases:
            assert given[call, case.name].status == 200, (call, case.name)
            assert given[call, f"{case.name}, streamed"].is_stream, (call, case.name)
    for call in (*BASE, *WHOLE):
        for status in (400, 401, 404, 413):
            assert given[call, str(status)].status == status
    for call in BASE:
        assert given[call, "broken, streamed"].is_stream
        assert given[call, "429"].status == 429
        assert given[call, "500"].status == 500
    assert given[MESSAGES, "503"].status == 529
    assert given["POST /v1/batches/{batch_id}/cancel", "begun"].status == 200
    statuses = [given[CHAT, f"completed, line {name}"].status for name in "ab"]
    assert statuses == [200, 400]
    completed = {"response.completed", "response.incomplete", "response.failed"}
    assert {a.events[-1].name for a in answers if a.is_stream and a.call == RESPONSES} == completed
    assert given[RESPONSES, "cancelled, streamed"].events[-1].value["response"]["status"] == (
        "cancelled"
    )
    message = given[CHAT, "text and two calls"].body["choices"][0]["message"]
    assert (message["content"], len(message["tool_calls"])) == ("So: ", 2)
    kinds = [item["type"] for item in given[RESPONSES, "thinking and a call"].body["output"]]
    assert kinds == ["reasoning", "function_call"]
    reasons = {answer.body["stop_reason"] for answer in answers if _is_message(answer)}
    assert reasons == {"end_turn", "tool_use", "max_tokens", "stop_sequence"}


def _is_message(answer: Answer) -> bool:
    return answer.call == MESSAGES and answer.status == 200 and not answer.is_stream
