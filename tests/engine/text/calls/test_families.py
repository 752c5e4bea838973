"""Calls of each model family: found by template, told in its form, read however they are split."""

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from baton.text.calls import formats
from baton.text.channels import ChannelParser
from baton.text.reasoning import ReasoningSyntax, ReasoningTags, Thinking
from baton.text.template import ChatTemplate
from baton.text.tool_calls import ToolCallParser
from baton.text.tools import PROMPTED, Tool, ToolSyntax, conversation
from tests.engine.text.calls.families import (
    FAMILIES,
    NO_ARGUMENTS,
    NOW,
    ROME,
    TEMPLATES,
    TOOLS,
    WEATHER,
    Family,
)
from tests.engine.text.reading import content_and_calls
from tests.soak import examples

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.template)
IN_CHANNELS = ReasoningSyntax(
    tags=ReasoningTags("<|channel|>analysis<|message|>", "<|end|>"), channels={"<|end|>": 1}
)


def syntax_of(family: Family) -> ToolSyntax:
    return ToolSyntax(format=family.format, forms=None)


class _Both:
    """Parser of channels, and behind it that of calls, as for a request."""

    def __init__(self, calls: ToolCallParser) -> None:
        self._channels = ChannelParser(Thinking(IN_CHANNELS))
        self._calls = calls

    def push(self, text):
        return self._calls.push(self._channels.push(text)[1])

    def finish(self):
        content, deltas = self._calls.push(self._channels.finish()[1])
        more, last = self._calls.finish()
        return content + more, [*deltas, *last]


def read(family: Family, pieces, tools=TOOLS):
    """Content, calls as (name, arguments), whether it was cut."""
    ids = itertools.count()
    calls_parser = ToolCallParser(syntax_of(family).expected(tools), lambda: f"call_{next(ids)}")
    parser = _Both(calls_parser) if family.format.in_channels else calls_parser
    content, calls = content_and_calls(parser, pieces)
    return content, calls, calls_parser.cut


@each_family
def test_a_template_tells_the_format(family):
    syntax = ToolSyntax.of(family.source)
    assert syntax.format is family.format
    assert syntax.forms is not None


@each_family
def test_what_it_writes_is_read(family):
    cases = [(family.one, [ROME]), *family.others]
    if family.two:
        cases.append((family.two, [ROME, NO_ARGUMENTS]))
    for text, calls in cases:
        assert read(family, [text]) == ("", calls, False), text
        assert read(family, list(text)) == ("", calls, False), text


@each_family
def test_a_name_may_have_every_character_that_the_api_allows(family):
    name = "a/b.c:d-e_9"
    tools = [replace(WEATHER, name=name), NOW]
    text = family.one.replace("get_weather", name)
    for pieces in ([text], list(text)):
        assert read(family, pieces, tools) == ("", [(name, ROME[1])], False)


@each_family
def test_text_around_calls_is_kept(family):
    if family.format.bare or family.format.in_channels:
        pytest.skip("an answer is a call or text")
    for text in (f"Let me see. {family.one} Done.", f"Let me see. {family.one}\n Done."):
        content, calls, cut = read(family, [text])
        assert content.split() == ["Let", "me", "see.", "Done."]
        assert (calls, cut) == ([ROME], False)


@each_family
@pytest.mark.parametrize(
    "text",
    [
        "",
        "  hello\n",
        "a <tool_cal b < [TOOL <｜tool {",
        '{"name": "Ada", "age": 36}',
        "<tool_call>hm hm</tool_call>!",
        "[TOOL_CALLS]no[TOOL_CALLS][1]",
        "<｜tool▁calls▁begin｜>no<｜tool▁call▁begin｜>",
        "<|python_tag|>print(1)",
        "<function=",
        '<tool_call>{"name": "f"}',
    ],
)
def test_what_is_no_call_is_text(family, text):
    content, calls, _ = read(family, list(text))
    assert (content, calls) == (text, [])


def _broken() -> list[str]:
    texts = [text for family in FAMILIES for text in (family.one, family.two)]
    parts = [part for text in texts for part in (text[: len(text) // 2], text[len(text) // 2 :])]
    tags = [tag for family in FAMILIES for tag in family.format.tags]
    tags += ["<function=now>", "<function=x>", "</function>", "<parameter=city>", "</parameter>"]
    return sorted({*texts, *parts, *tags, " ", "\n", "text", '{"', "}", "]", '"', "<", ": {", ";"})


@each_family
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_pieces_do_not_matter(family, data):
    own = st.sampled_from([family.one, family.two, *family.format.tags])
    parts = st.one_of(own, st.sampled_from(_broken()))
    text = "".join(data.draw(st.lists(parts, max_size=5)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert read(family, pieces) == read(family, [text]) == read(family, list(text))


@each_family
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_no_word_is_lost(family, data):
    if family.format.in_channels:
        return  # a word between two tags is the header of a message
    own = st.sampled_from([family.one, family.two, *family.format.tags])
    parts = data.draw(st.lists(st.one_of(own, st.sampled_from(_broken())), max_size=4))
    words = [f"word{i}" for i in range(len(parts) + 1)]
    text = "".join(itertools.chain.from_iterable(zip(words, [*parts, ""], strict=True)))
    content, calls, _ = read(family, [text])
    told = content + "".join(name + arguments for name, arguments in calls)
    assert [word for word in words if word not in told] == []


@each_family
def test_a_cut_call_says_so_or_is_complete(family):
    for size in range(1, len(family.one)):
        content, calls, cut = read(family, [family.one[:size]])
        complete = calls == [ROME]
        assert not (complete and content.strip())
        if complete:
            json.loads(calls[0][1])
        elif calls:
            assert cut, size
            # What may begin a tag belongs to the value, since no tag follows.
            written = calls[0][1].split("<")[0].removesuffix("\\n").rstrip()
            assert ROME[1].startswith(written), size
        else:
            assert content == family.one[:size] or family.format.in_channels, size


@each_family
def test_nothing_of_the_markup_of_a_cut_call_is_shown_where_only_calls_may_be(family):
    """The second of two calls may be cut, too; a call appears once its name is complete."""
    if family.format.in_channels:
        return  # the channels hide it
    ids = itertools.count()
    expected = syntax_of(family).expected(TOOLS, only=True)
    shown = []
    for size in range(1, len(family.one)):
        parser = ToolCallParser(expected, lambda: f"call_{next(ids)}")
        content, deltas = parser.push(family.one[:size])
        more, last = parser.finish(was_cut=True)
        assert (content + more).strip() == "", size
        shown.append([delta.name for delta in (*deltas, *last) if delta.name is not None])
    assert shown[0] == [] and shown[-1] == [ROME[0]]
    assert all(names in ([], [ROME[0]]) for names in shown)


@pytest.mark.parametrize("schema", [{"type": ["string", "null"]}, {}, {"type": "integer"}])
@pytest.mark.parametrize("value", ['hello "wor', "hello\n", "nul", "4", "", "x < </arg_val"])
def test_a_value_that_was_cut_is_the_begin_of_json(schema, value):
    tool = Tool(name="f", description=None, parameters={"properties": {"a": schema}})
    text = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}"
    family = next(f for f in FAMILIES if f.template == "GLM-4.6")
    content, [(name, arguments)], cut = read(family, [text], [tool])
    assert (content, name, cut) == ("", "f", True)
    from_json(arguments, allow_partial="trailing-strings")
    if schema != {"type": "integer"}:
        assert arguments == ('{"a": ' + json.dumps(value)[:-1] if value else '{"a": ')
    assert read(family, list(text), [tool]) == (content, [(name, arguments)], cut)


CODER = next(f for f in FAMILIES if f.template == "Qwen3-Coder")
LLAMA = next(f for f in FAMILIES if f.format is formats.LLAMA)


@pytest.mark.parametrize("end", ["", "\n", "\n</tool", "\n</tool_call>"])
def test_the_text_may_end_behind_a_function(end):
    text = CODER.one.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>") + end
    assert read(CODER, [text]) == read(CODER, list(text)) == ("", [ROME], False)
    empty = f"<function=now>\n</function>{end}"
    assert read(CODER, [empty]) == read(CODER, list(empty)) == ("", [NO_ARGUMENTS], False)


@pytest.mark.parametrize("name", ["now", "name"])
@pytest.mark.parametrize(
    "text",
    [
        "Qwen writes <function={}> and then parameters.",
        "Qwen writes <tool_call> \n<function={}>, then parameters.",
        "Qwen writes <function={}><function={}>\n.",
    ],
)
def test_a_mention_of_the_markup_is_text(name, text):
    text = text.replace("{}", name)
    for pieces in ([text], list(text)):
        assert read(CODER, pieces) == (text, [], False)
    text += CODER.one
    assert (
        read(CODER, [text]) == read(CODER, list(text)) == (text[: -len(CODER.one)], [ROME], False)
    )


def test_a_function_that_is_not_offered_is_text():
    text = "Like <function=name>\n</function>."
    assert read(CODER, [text]) == read(CODER, list(text)) == (text, [], False)


def test_an_answer_by_a_schema_is_no_call():
    text = '{"name": "Ada", "parameters": {"age": 36}, "more": []}'
    assert read(LLAMA, [text]) == read(LLAMA, list(text)) == (text, [], False)


@each_family
def test_arguments_come_as_they_are_written(family):
    parser = ToolCallParser(syntax_of(family).expected(TOOLS))
    if family.format.in_channels:
        parser = _Both(parser)
    seen = [delta for piece in family.one for delta in parser.push(piece)[1]]
    assert seen[0].name == "get_weather"
    assert len(seen) > 5


CALLED = {"id": "call_0123456789", "name": "get_weather", "arguments": '{"city": "Rome"}'}
AGAIN = {"id": "call_9876543210", "name": "get_weather", "arguments": '{"city": "Oslo"}'}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Compare them."},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "First Rome.",
        "tool_calls": [CALLED],
    },
    {"role": "tool", "tool_call_id": "call_0123456789", "content": "18 degrees"},
    {"role": "assistant", "content": "", "reasoning_content": "Now Oslo.", "tool_calls": [AGAIN]},
    {"role": "tool", "tool_call_id": "call_9876543210", "content": "9 degrees"},
]
KEEPS_REASONING = {
    "Qwen-Qwen3-0.6B",
    "Qwen3.5-4B",
    "GLM-4.6",
    "GLM-4.7-Flash",
    "openai-gpt-oss-120b",
    "mistralai-Ministral-3-14B-Reasoning-2512",
}


def rendered(family: Family, messages, tools=(WEATHER,)) -> str:
    syntax = ToolSyntax.of(family.source)
    told, listed = conversation(messages, tools, syntax)
    template = ChatTemplate(family.source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(told, tools=listed)


@each_family
def test_two_turns_with_a_tool_are_told(family):
    text = rendered(family, TURNS)
    for part in ("Weather of a city", "Compare them.", "Rome", "18 degrees", "Oslo", "9 degrees"):
        assert part in text, part
    assert text.count("get_weather") >= 3
    assert '\\"city' not in text, "arguments are not JSON within JSON"


@each_family
def test_reasoning_of_turns_with_calls_is_kept_where_the_template_shows_it(family):
    text = rendered(family, TURNS)
    shown = "First Rome." in text and "Now Oslo." in text
    assert shown is (family.template in KEEPS_REASONING)


@each_family
def test_several_calls_in_one_turn_are_told(family):
    turns = [
        *TURNS[1:2],
        {"role": "assistant", "content": "", "tool_calls": [CALLED, AGAIN]},
        *TURNS[3:4],
        *TURNS[5:],
    ]
    text = rendered(family, turns)
    for part in ("Rome", "Oslo", "18 degrees", "9 degrees"):
        assert part in text, part


@each_family
def test_a_replayed_call_that_was_cut_is_no_error(family):
    cut = {**CALLED, "arguments": '{"city": "Ro'}
    turns = [*TURNS[1:2], {"role": "assistant", "content": "", "tool_calls": [cut]}, *TURNS[3:4]]
    assert "Ro" in rendered(family, turns)


@each_family
def test_a_tool_without_description_is_told(family):
    if family.template.startswith("NousResearch"):
        pytest.skip("its template requires a description")
    assert "now" in rendered(family, TURNS[1:2], TOOLS[1:])


def test_what_the_template_writes_is_what_the_parser_reads():
    """The call in the rendered conversation, taken from it, is the same call."""
    for family in FAMILIES:
        if family.format in (formats.DEEPSEEK, formats.GPT_OSS):
            continue  # its template does not close a single call; its header has another order
        text = rendered(family, TURNS[:4])
        asked = text.index("Compare them.")
        marks = [text.find(mark, asked) for mark in (*family.format.tags, '{"name"')]
        start = min(at for at in marks if at >= 0)
        _, calls, _ = read(family, [text[start:]])
        assert calls == [("get_weather", '{"city": "Rome"}')], family.template


def test_mistral_gets_ids_of_nine_characters():
    told, _ = conversation(TURNS, [WEATHER], ToolSyntax.of(FAMILIES[7].source))
    ids = [told[2]["tool_calls"][0]["id"], told[3]["tool_call_id"]]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 9
    assert ids[0].isalnum()


def test_gemma_is_told_of_tools_by_baton():
    source = (TEMPLATES / "google-gemma-3-4b-it.jinja").read_text(encoding="utf-8")
    assert ToolSyntax.of(source) is PROMPTED
    more = {"role": "user", "content": "And Paris?"}
    told, listed = conversation([*TURNS, more], [WEATHER], PROMPTED)
    text = ChatTemplate(source).render(told, tools=listed)
    assert text.startswith("<start_of_turn>user\nBe brief.\n\nYou can call these functions")
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>' in text
    assert "<tool_response>9 degrees</tool_response>\nAnd Paris?<end_of_turn>" in text


def test_deepseek_is_told_of_tools_as_its_model_card_does():
    text = rendered(next(f for f in FAMILIES if f.template.endswith("V3.1")), TURNS)
    assert text.startswith("<s>Be brief.\n\n## Tools\nYou have access to the following tools:\n\n")
    assert "### get_weather\nDescription: Weather of a city\n\nParameters: {" in text
    assert "<｜tool▁call▁end｜>{{additional_tool_calls}}<｜tool▁calls▁end｜>\n\nWhere:" in text


@pytest.mark.parametrize(
    "template",
    [
        "{% if tools %}[TOOL_CALLS]{% endif %}",
        "{{ '<tool_call>' + tools }}",
        "{% if %}",
        # It has the tag, and writes calls in another way.
        "<tool_call>{% for m in messages %}{{ m | tojson }}{% endfor %}",
    ],
)
def test_a_template_that_renders_no_calls_is_not_used_for_them(template):
    assert ToolSyntax.of(template) is PROMPTED
