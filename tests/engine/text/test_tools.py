"""How models are told of tools, and which calls they may write."""

import json
import time

import pytest

from baton.text.calls.formats import GPT_OSS, HERMES
from baton.text.calls.forms import MessageForms
from baton.text.calls.grammar import calls_grammar
from baton.text.grammar import GrammarCompiler, translate, vocabulary_of
from baton.text.template import ChatTemplate
from baton.text.tools import PROMPTED, Tool, ToolSyntax, conversation

WEATHER = Tool(
    name="weather",
    description="Weather of a city",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
NOW = Tool(name="now", description=None, parameters=None)
CALLED = {"id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'}
MESSAGES = [
    {"role": "user", "content": "Weather in Rome?"},
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "call_1", "content": "18 C"},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]
# Ours, in the manner of templates that know tools.
KNOWS = """\
{%- if tools %}{% for tool in tools %}[{{ tool | tojson }}]{% endfor %}{% endif %}
{%- for message in messages %}
{{- message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %};
{%- endfor %}"""


def test_a_template_that_knows_tools_writes_them_itself():
    syntax = ToolSyntax.of(KNOWS)
    assert syntax.format is HERMES
    told, tools = conversation(MESSAGES, [WEATHER], syntax)
    text = ChatTemplate(KNOWS).render(told, tools=tools)
    assert text.startswith('[{"type": "function", "function": {"name": "weather", "description"')
    assert '\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>;' in text
    assert "tool: 18 C;" in text


def test_the_name_of_a_result_reaches_a_template_that_knows_tools():
    named = [{**message, "name": "weather"} for message in MESSAGES if message["role"] == "tool"]
    told, _ = conversation(named, [WEATHER], ToolSyntax.of(KNOWS))
    source = f"{KNOWS}{{{{ messages[0].name }}}}"
    assert ChatTemplate(source).render(told).endswith("tool: sunny;weather")


@pytest.mark.parametrize(
    "template", [None, "{{ messages }}", "{% if tools %}[TOOL_CALLS]{% endif %}"]
)
def test_every_other_one_gets_batons_prompt(template):
    assert ToolSyntax.of(template) is PROMPTED
    told, tools = conversation(MESSAGES, [WEATHER, NOW], PROMPTED)
    assert tools == []
    assert [message["role"] for message in told] == ["system", "user", "assistant", "user"]
    system, _, call, results = (message["content"] for message in told)
    assert '{"name": "weather", "description": "Weather of a city", "parameters": {' in system
    assert '{"name": "now", "parameters": {"type": "object", "properties": {}}}' in system
    assert call == '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    assert results == ("<tool_response>18 C</tool_response>\n<tool_response>sunny</tool_response>")


def test_the_clients_own_system_message_stays_first():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    told, _ = conversation(messages, [NOW], PROMPTED)
    assert told[0]["content"].startswith("Be brief.\n\nYou can call")
    assert conversation(messages, [], PROMPTED)[0] == messages


@pytest.fixture(scope="module")
def compiler(smollm):
    return GrammarCompiler(vocabulary_of(smollm, smollm.vocab_size, (2,)))


def call(name, arguments, gap=""):
    inside = f'{{"name": "{name}", "arguments": {json.dumps(arguments)}}}'
    return f"<tool_call>{gap}{inside}{gap}</tool_call>"


ROME = call("weather", {"city": "Rome"})


@pytest.mark.parametrize(
    ("choice", "parallel", "text", "fits"),
    [
        ("required", True, ROME, True),
        ("required", True, call("weather", {"city": "Rome"}, "\n"), True),
        ("required", True, f"{ROME}\n{call('now', {})}", True),
        ("required", True, f"Well, {ROME}", False),
        ("required", True, "", False),
        ("required", True, ROME * 9, False),
        ("required", False, ROME, True),
        ("required", False, ROME * 2, False),
        ("required", True, call("weather", {"days": 3}), False),
        ("required", True, call("weather", {"city": "Rome", "more": 1}), False),
        ("required", True, call("rain", {}), False),
        ("required", True, call("now", {"a": 1}), False),
        ("auto", True, "Just text <b> and < and <tool", True),
        ("auto", True, f"Well, {ROME} and {ROME}.", True),
        ("auto", True, "<tool_call>hm", False),
        ("auto", True, f"{ROME}<tool_call>hm", False),
        ("auto", False, f"Well, {ROME}", True),
        ("auto", False, f"{ROME} and", False),
    ],
)
def test_what_may_be_written(compiler, smollm, choice, parallel, text, fits):
    source = calls_grammar([WEATHER, NOW], choice, parallel=parallel, syntax=PROMPTED)
    matcher = compiler.compile(translate("grammar", source))
    ids = smollm.encode(text)
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is fits


BY_CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/city", "$defs": {"city": BY_CITY}},
        {"type": "object", "anyOf": [BY_CITY, {**BY_CITY, "required": []}]},
        {"oneOf": [BY_CITY, {"type": "object", "required": ["id"]}]},
        {"allOf": [BY_CITY]},
    ],
)
def test_arguments_may_be_named_by_schemas_that_are_joined(compiler, smollm, parameters):
    tool = Tool(name="weather", description=None, parameters=parameters)
    source = calls_grammar([tool], "required", parallel=False, syntax=PROMPTED)
    matcher = compiler.compile(translate("grammar", source))
    assert matcher.try_consume_tokens(smollm.encode(ROME)) and matcher.is_accepting()


def test_many_calls_in_one_turn_take_linear_time():
    calls = [{"id": f"call_{i}", "name": "now", "arguments": "{}"} for i in range(5000)]
    results = [
        {"role": "tool", "content": str(i), "tool_call_id": f"call_{i}"} for i in range(5000)
    ]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}, *results]
    syntax = ToolSyntax(format=GPT_OSS, forms=MessageForms())
    begin = time.process_time()
    told, _ = conversation(messages, [], syntax)
    assert time.process_time() - begin < 2
    assert [m["content"] for m in told if m["role"] == "tool"] == [r["content"] for r in results]
    assert [m["role"] for m in told] == ["assistant", "tool"] * 5000
