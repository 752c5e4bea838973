"""Calls are read as they arrive; nothing that was written is lost."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.text.tool_calls import ToolCallParser
from baton.text.tools import PROMPTED
from tests.engine.text.reading import content_and_calls

HERMES = PROMPTED.expected(())
ONE = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
DEEP = f'<tool_call>{{"arguments": {{"a": {"[" * 5000}{"]" * 5000}}}, "name": "f"}}</tool_call>'
HALF = '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>'
TWO = '<tool_call>\n{"name": "add", "arguments": {"x": [1, {"y": "}]\\"{"}]}}\n</tool_call>'


def read(pieces):
    """Content, calls as (name, arguments), whether it was cut."""
    ids = itertools.count()
    parser = ToolCallParser(HERMES, lambda: f"call_{next(ids)}")
    content, calls = content_and_calls(parser, pieces)
    return content, calls, parser.cut


PARIS = ("weather", '{"city": "Paris"}')
ADD = ("add", '{"x": [1, {"y": "}]\\"{"}]}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("", "", []),
        ("  hello\n", "  hello\n", []),
        ("\n", "\n", []),
        (ONE, "", [PARIS]),
        (ONE + TWO, "", [PARIS, ADD]),
        (ONE + "\n" + TWO + "\n", "", [PARIS, ADD]),
        ("Let me see. " + ONE + " Done.", "Let me see.  Done.", [PARIS]),
        ("\n\n" + TWO, "", [ADD]),
        ("a <tool_cal b <", "a <tool_cal b <", []),
        # Written otherwise, and still a call:
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        # Not a call: shown as it was written.
        ("<tool_call>hello</tool_call>!", "<tool_call>hello</tool_call>!", []),
        ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
        ("<tool_call>[1]</tool_call>" + ONE, "<tool_call>[1]</tool_call>", [PARIS]),
        (DEEP, DEEP, []),
        (HALF, HALF, []),
        ("<tool_call>" + "x" * 5000, "<tool_call>" + "x" * 5000, []),
        ('<tool_call>{"name": "f", "arguments": {}} or', "} or", [("f", "{}")]),
    ],
)
def test_what_is_read(text, content, calls):
    assert read([text])[:2] == (content, calls)


@settings(deadline=None)
@given(st.data())
def test_pieces_do_not_matter(data):
    parts = [ONE, TWO, "text", " ", "\n", "<tool_call>", "</tool_call>", "<tool", '{"a": "<']
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=6)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert read(pieces) == read([text]) == read(list(text))


def test_arguments_come_as_they_are_written():
    parser = ToolCallParser(HERMES)
    parser.push('<tool_call>{"name": "f", "argu')
    _, [start, first] = parser.push('ments": {"a": 1')
    assert (start.index, start.name, start.arguments) == (0, "f", "")
    assert start.id.startswith("call_")
    assert (first.id, first.name, first.arguments) == (None, None, '{"a": 1')
    _, [second] = parser.push("2}")
    assert second.arguments == "2}"
    assert parser.push("}</tool_call>") == ("", [])
    assert parser.calls == 1


def test_text_is_held_no_longer_than_it_may_be_a_tag():
    parser = ToolCallParser(HERMES)
    assert parser.push("a <tool")[0] == "a "
    assert parser.push("s>")[0] == "<tools>"


@pytest.mark.parametrize("size", range(len("<tool_call>"), len(ONE)))
def test_a_cut_call_says_so_or_is_complete(size):
    content, calls, cut = read([ONE[:size]])
    complete = bool(calls) and calls[0] == PARIS
    assert cut is not complete
    if complete:
        json.loads(calls[0][1])
    assert content in ("", ONE[:size])
    assert content or calls


@pytest.mark.parametrize(
    ("written", "content", "names"),
    [
        ("a <tool_call>", "a ", []),
        ('a <tool_call>{"na', "a ", []),
        ('<tool_call>{"name": "wea', "", []),
        ('<tool_call>{"name": "weather"', "", ["weather"]),
        ('<tool_call>{"arguments": {"city": "P', "", []),
        (ONE + '\n<tool_call>\n{"name": "', "", ["weather"]),
        ("a <", "a <", []),
    ],
)
def test_the_markup_of_a_call_that_was_cut_in_its_head_is_not_shown(written, content, names):
    parser = ToolCallParser(HERMES)
    before, deltas = parser.push(written)
    after, last = parser.finish(was_cut=True)
    assert (before + after).rstrip() == content.rstrip()
    assert [delta.name for delta in (*deltas, *last) if delta.name] == names


def test_a_call_knows_the_text_before_it():
    parser = ToolCallParser(HERMES)
    _, calls = parser.push("ab " + ONE + " cd " + ONE)
    before = [delta.text_before for delta in calls if delta.name is not None]
    assert before == [3, 7]
