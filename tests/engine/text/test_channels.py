"""Channels of gpt-oss are separated, whatever the pieces of the text are."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.text.channels import ChannelParser, parser_of
from baton.text.reasoning import ReasoningParser, ReasoningSyntax, ReasoningTags, Thinking
from tests.engine.text.calls.families import FAMILIES, with_tags
from tests.engine.text.reading import thoughts_and_content

SYNTAX = ReasoningSyntax(
    tags=ReasoningTags("<|channel|>analysis<|message|>", "<|end|>"), channels={"<|end|>": 1}
)
GPT_OSS = FAMILIES[-1]
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.f<|message|>"


def read(pieces, begun=False):
    return thoughts_and_content(ChannelParser(Thinking(SYNTAX, begun)), pieces)


@pytest.mark.parametrize(
    ("text", "thoughts", "content"),
    [
        ("", "", ""),
        (f"{ANALYSIS}Hm.{NEXT}{FINAL}Paris.", "Hm.", "Paris."),
        (f"{ANALYSIS}Hm.{NEXT}{FINAL}Paris.<|return|>", "Hm.", "Paris."),
        (f"{ANALYSIS}A.{NEXT}{ANALYSIS}B.{NEXT}{FINAL}C", "A.\nB.", "C"),
        (f"{ANALYSIS}Hm", "Hm", ""),
        (f"{FINAL}a <|mess b < c", "", "a <|mess b < c"),
        (f"{FINAL}a<|message|>b", "", "a<|message|>b"),
        ("Paris.", "", "Paris."),  # the prompt ends within the message
        (" towards", "", " towards"),
        (
            f"{ANALYSIS}Hm.{NEXT}<|channel|>commentary<|message|>I look.{NEXT}"
            '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
            "Hm.",
            f'I look.{CALL}{{"a": 1}}',
        ),
        (
            f'{ANALYSIS}Hm.{NEXT} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}',
            "Hm.",
            f'{CALL}{{"a": 1}}',
        ),
        (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', "", f'{CALL}{{"a": 1}}'),
        # Headers that break off are no text; other text in their place is.
        ("<|channel|>", "", ""),
        (f"{ANALYSIS}Hm.{NEXT}<|channel|>fin", "Hm.", ""),
        (f"{ANALYSIS}Hm.<|end|>Paris.", "Hm.", "Paris."),
        (f"{ANALYSIS}Hm.<|end|>Paris.<|start|>assistant{FINAL}Yes", "Hm.", "Paris.\nYes"),
        ("<|channel|>commentary to=functions.f", "", "<|channel|>commentary to=functions.f"),
        ("<|channel|>final Paris.", "", "<|channel|>final Paris."),
    ],
)
def test_what_is_read(text, thoughts, content):
    assert read([text]) == (thoughts, content)
    for cut in range(len(text)):  # in two pieces, at all places
        assert read([text[:cut], text[cut:]]) == (thoughts, content)


@given(st.data())
def test_pieces_do_not_matter(data):
    parts = [ANALYSIS, FINAL, NEXT, CALL, "text", " ", "<|channel|>", "<|message|>", "<|end|>"]
    parts += ["<|start|>", "to=functions.f", "assistant", "<|", "<|constrain|>", "<|call|>"]
    parts += ["x" * 240, "y" * 255]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=8)))
    begun = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert read(pieces, begun) == read([text], begun) == read(list(text), begun)


def test_thinking_comes_as_it_is_written():
    parser = ChannelParser(Thinking(SYNTAX))
    assert parser.push("<|channel|>analysis") == ("", "")
    assert parser.thinking
    assert parser.push("<|message|>a <|") == ("a ", "")
    assert parser.push("b") == ("<|b", "")
    assert parser.push(NEXT) == ("", "")
    assert not parser.thinking
    assert parser.push(f"{FINAL}c") == ("", "c")
    assert not parser.thinking


def test_a_model_with_channels_is_known_by_its_template_and_vocabulary(smollm):
    assert ReasoningSyntax.of(GPT_OSS.source, smollm) is None, "its vocabulary lacks the tags"
    found = ReasoningSyntax.of(GPT_OSS.source, with_tags(smollm))
    assert set(found.channels) >= {"<|start|>", "<|channel|>", "<|message|>", "<|end|>"}
    assert found.special_ids == set(found.channels.values())
    assert isinstance(parser_of(Thinking(found)), ChannelParser)
    tags = ReasoningSyntax(tags=ReasoningTags("<think>", "</think>"))
    assert isinstance(parser_of(Thinking(tags)), ReasoningParser)
    assert not found.begun_by("<|start|>assistant")
    assert not found.closed_by("Hi<|end|>")


@pytest.mark.parametrize("begin", ["<|channel|>", " to=functions.", "<|channel|>final<|end|>"])
def test_a_header_that_is_too_long_is_content(begin):
    long = begin + "x" * 300
    text = f"{long}<|message|>y{NEXT}{FINAL}Paris."
    expected = f"{long.split('<|end|>')[-1]}<|message|>y\nParis."
    for pieces in ([text], list(text), [text[:250], text[250:]]):
        assert read(pieces) == ("", expected)
    parser = ChannelParser(Thinking(SYNTAX))
    shown = "".join(parser.push(character)[1] for character in long)
    assert shown == expected.split("<|message|>")[0], "it is not held until the end"
