"""Answers of model families whose tags are special tokens, from tokens to deltas."""

from dataclasses import replace

import pytest

from baton.text.reasoning import ReasoningSyntax, Thinking
from baton.text.tools import ToolSyntax
from router.routing.requests.record import RequestRecord
from tests.engine.text.calls.families import FAMILIES, TOOLS, Family, with_tags
from tests.router.requests.test_record import request, run

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.template)


@pytest.fixture(scope="module")
def tokenizer(model):
    return with_tags(model.tokenizer)


def answer(family: Family, tokenizer, text: str, *, tools=TOOLS):
    """Text, reasoning, calls and finish reason of an answer that comes token by token."""
    syntax = ToolSyntax.of(family.source, tokenizer)
    found = ReasoningSyntax.of(family.source, tokenizer)
    thinking = None if found is None else Thinking(found)
    calls = syntax.expected(tools) if tools else None
    record = RequestRecord(replace(request(), expected_calls=calls, thinking=thinking), tokenizer)
    record.next_attempt()
    ids = tokenizer.encode(text)
    deltas = []
    for index, token in enumerate(ids):
        last = index == len(ids) - 1
        record.on_run(run(index, [token], reason="stop" if last else ""), 5)
        deltas += record.take()
    named = [(call.name, "") for delta in deltas for call in delta.calls if call.id]
    for delta in deltas:
        for call in delta.calls:
            name, before = named[call.index]
            named[call.index] = (name, before + call.arguments)
    return (
        "".join(delta.text for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        named,
        deltas[-1].finish_reason,
    )


@each_family
def test_a_call_is_told_apart_token_by_token(family, tokenizer):
    calls = [("get_weather", '{"city": "Rome", "days": 3}')]
    assert answer(family, tokenizer, family.one) == ("", "", calls, "tool_calls")


def test_channels_are_told_apart_with_and_without_tools(tokenizer):
    family = FAMILIES[-1]
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Rome is warm."
    )
    for tools in (TOOLS, ()):
        found = answer(family, tokenizer, text, tools=tools)
        assert found == ("Rome is warm.", "Hm.", [], "stop")
    before, _, _ = text.partition("<|channel|>final")
    _, thoughts, calls, reason = answer(family, tokenizer, before + family.one)
    assert (thoughts, reason) == ("Hm.", "tool_calls")
    assert calls == [("get_weather", '{"city": "Rome", "days": 3}')]
