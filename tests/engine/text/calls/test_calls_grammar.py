"""Grammar of each family: it allows calls of known functions with valid arguments only."""

import json
import time

import pytest

from baton.text.calls import formats
from baton.text.calls.grammar import calls_grammar
from baton.text.grammar import (
    MAX_SOURCE_CHARACTERS,
    Framed,
    GrammarCompiler,
    translate,
    vocabulary_of,
)
from baton.text.reasoning import ReasoningSyntax
from baton.text.tool_calls import ToolCallParser
from baton.text.tools import Tool, ToolSyntax
from tests.engine.text.calls.families import (
    FAMILIES,
    NO_ARGUMENTS,
    ROME,
    TOOLS,
    WEATHER,
    Family,
    with_tags,
)
from tests.engine.text.calls.test_families import each_family, read

GPT_OSS = FAMILIES[-1]
CODER = next(f for f in FAMILIES if f.template == "Qwen3-Coder")


@pytest.fixture(scope="module")
def tokenizer(smollm):
    return with_tags(smollm)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(vocabulary_of(tokenizer, tokenizer.vocab_size, (2,)))


@pytest.fixture(scope="module")
def allows(compiler, tokenizer):
    """Return whether a complete text follows the grammar of calls, each of which compiles once."""
    compiled = {}

    def allows(family: Family, choice, text, *, tools=TOOLS, parallel=True) -> bool:
        syntax = ToolSyntax.of(family.source, tokenizer)
        assert syntax.format is family.format
        source = calls_grammar(tools, choice, parallel=parallel, syntax=syntax)
        if source not in compiled:
            compiled[source] = compiler.compile(translate("grammar", source))
        matcher = compiled[source].deep_copy()
        ids = tokenizer.encode(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return allows


@each_family
def test_calls_that_it_writes_are_allowed_and_read(allows, family):
    for choice in ("auto", "required"):
        assert allows(family, choice, family.one)
        assert allows(family, choice, family.one, parallel=False)
        assert read(family, [family.one]) == ("", [ROME], False)
        if family.two:
            assert allows(family, choice, family.two)
            assert not allows(family, choice, family.two, parallel=False)
            assert read(family, [family.two]) == ("", [ROME, NO_ARGUMENTS], False)


@each_family
def test_text_is_allowed_where_the_model_may_choose(allows, family):
    for text in ("Just text <b> and {", '{"a": 1}', ""):
        assert allows(family, "auto", text)
        assert not allows(family, "required", text)
    assert not allows(family, "required", f"Well, {family.one}")
    if not (family.format.in_channels or family.format.bare):
        assert allows(family, "auto", f"Well, {family.one}")


@each_family
def test_a_started_call_is_one_of_a_known_function(allows, family):
    one = family.one
    for choice in ("auto", "required"):
        assert not allows(family, choice, one.replace("get_weather", "get_rain"))
        assert not allows(family, choice, one.replace("city", "town"))
        assert not allows(family, choice, one.replace("3", "three"))
        assert not allows(family, choice, one[: len(one) * 2 // 3])


@each_family
def test_required_arguments_are_required(allows, family):
    now = Tool(name="get_weather", description=None, parameters=None)
    assert not allows(family, "required", family.one, tools=[now])
    strict = {**(WEATHER.parameters or {}), "required": ["city", "unit"]}
    strict_tool = Tool(name="get_weather", description=None, parameters=strict)
    assert not allows(family, "required", family.one, tools=[strict_tool])


def coder_call(*values: tuple[str, str]) -> str:
    inside = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in values)
    return f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("schema", "value", "fits", "argument"),
    [
        ({"type": "string"}, 'a "b"\n<c>', True, 'a "b"\n<c>'),
        ({"type": "string"}, "", True, ""),
        ({"type": "integer"}, "12", True, 12),
        ({"type": "integer"}, "x", False, "x"),
        ({"type": "boolean"}, "true", True, True),
        ({"type": "boolean"}, "True", False, True),  # as Python writes it
        ({"type": ["integer", "null"]}, "null", True, None),
        ({"type": ["string", "null"]}, "null", True, None),
        ({"type": ["string", "integer"]}, "12", True, 12),
        ({"type": ["string", "integer"]}, "a12", True, "a12"),
        ({"type": "string"}, "12", True, "12"),
        ({}, '"quoted"', True, '"quoted"'),
        ({}, '{"a": [1]}', True, {"a": [1]}),
        ({"enum": ["a", "b"]}, "b", True, "b"),
        ({"enum": ["a", "b"]}, "c", False, "c"),
        ({"enum": [1, 2]}, "2", True, 2),
        ({"$ref": "#/$defs/size"}, '{"w": 1}', True, {"w": 1}),
        ({"$ref": "#/$defs/size"}, '{"w": "a"}', False, {"w": "a"}),
        ({"anyOf": [{"type": "string"}, {"type": "string", "enum": ["a"]}]}, "1", True, "1"),
    ],
)
def test_values_outside_json(allows, schema, value, fits, argument):
    parameters = {
        "type": "object",
        "properties": {"x": schema},
        "$defs": {"size": {"type": "object", "properties": {"w": {"type": "integer"}}}},
    }
    tool = Tool(name="f", description=None, parameters=parameters)
    text = coder_call(("x", value))
    assert allows(CODER, "required", text, tools=[tool]) is fits
    for pieces in ([text], text):
        parser = ToolCallParser(ToolSyntax(format=formats.QWEN_CODER, forms=None).expected([tool]))
        deltas = [delta for piece in pieces for delta in parser.push(piece)[1]]
        assert json.loads("".join(delta.arguments for delta in deltas)) == {"x": argument}


@pytest.mark.parametrize(
    ("parameters", "fits"),
    [
        ({"type": "object"}, False),
        ({"type": "object", "properties": {"a": {}}}, False),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": True}, True),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "object"}}}, True),
    ],
)
def test_other_parameters_only_where_the_schema_has_them(allows, parameters, fits):
    tool = Tool(name="f", description=None, parameters=parameters)
    assert allows(CODER, "required", coder_call(("b", "1")), tools=[tool]) is fits


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
PREAMBLE = "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "auto", "required"),
    [
        (GPT_OSS.one, True, True),
        (ANALYSIS + GPT_OSS.one, True, True),
        (ANALYSIS * 2 + GPT_OSS.one, True, True),
        (ANALYSIS + PREAMBLE + GPT_OSS.one, True, False),
        (ANALYSIS + FINAL + "Rome is warm.", True, False),
        (FINAL + "Rome is warm.", True, False),
        (ANALYSIS, True, False),  # an empty answer
        ("<|channel|>analysis<|message|>Hm.", False, False),
        (ANALYSIS + GPT_OSS.one + "<|end|>", False, False),
    ],
)
def test_channels_around_calls(compiler, tokenizer, text, auto, required):
    reasoning = ReasoningSyntax.of(GPT_OSS.source, tokenizer)
    syntax = ToolSyntax.of(GPT_OSS.source, tokenizer)
    before = reasoning.grammar(begun=False, end_ids=(2,), budget=None)
    for choice, fits in (("auto", auto), ("required", required)):
        main = calls_grammar(TOOLS, choice, parallel=True, syntax=syntax)
        source = Framed("grammar", main, before).encoded()
        matcher = compiler.compile(translate("framed", source))
        ids = tokenizer.encode(text)
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is fits


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"a": 1}', True),
        (f'{ANALYSIS}{FINAL}{{"a": 1}}', True),
        (f"{ANALYSIS}{FINAL}Yes", False),
        (f"{ANALYSIS}{GPT_OSS.one}", False),
    ],
)
def test_channels_around_a_shape(compiler, tokenizer, text, fits):
    reasoning = ReasoningSyntax.of(GPT_OSS.source, tokenizer)
    before = reasoning.grammar(begun=False, end_ids=(2,), budget=4)
    source = Framed("json", '{"properties": {"a": {"type": "integer"}}}', before).encoded()
    matcher = compiler.compile(translate("framed", source))
    ids = tokenizer.encode(text)
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is fits


@pytest.fixture(scope="module")
def all_tags(smollm):
    return with_tags(smollm, ("<", "["))


@pytest.fixture(scope="module")
def all_tags_compiler(all_tags):
    return GrammarCompiler(vocabulary_of(all_tags, all_tags.vocab_size, (2,)))


@each_family
def test_all_tags_may_be_special_tokens(all_tags, all_tags_compiler, family):
    tokenizer, compiler = all_tags, all_tags_compiler
    syntax = ToolSyntax.of(family.source, tokenizer)
    assert set(syntax.token_ids) == set(family.format.tags)
    for choice in ("auto", "required"):
        source = calls_grammar(TOOLS, choice, parallel=True, syntax=syntax)
        matcher = compiler.compile(translate("grammar", source))
        ids = tokenizer.encode(family.two or family.one)
        assert matcher.try_consume_tokens(ids) == len(ids)
        assert matcher.is_accepting()


@each_family
def test_200_tools_are_written_and_compiled_in_time(compiler, tokenizer, family):
    properties = {
        "path": {"type": "string", "description": "x" * 80},
        "line": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "mode": {"type": "string", "enum": ["a", "b"]},
        "force": {"type": "boolean"},
    }
    tools = [
        Tool(
            name=f"tool_{i}",
            description="x" * 200,
            parameters={
                "type": "object",
                "properties": {**properties, f"own_{i}": {"type": "object", "properties": {}}},
                "required": ["path"],
            },
        )
        for i in range(200)
    ]
    syntax = ToolSyntax.of(family.source, tokenizer)
    began_s = time.process_time()
    source = calls_grammar(tools, "auto", parallel=True, syntax=syntax)
    compiler.compile(translate("grammar", source))
    assert time.process_time() - began_s < 4


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"a": {"type": [["string"]]}}},
        {"type": "object", "properties": {"a": {"type": [{}, 1]}}},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": 5},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": "a"},
    ],
)
def test_a_schema_that_is_none_is_no_type_error(parameters):
    tool = Tool(name="f", description=None, parameters=parameters, lenient=True)
    syntax = ToolSyntax(format=formats.QWEN_CODER, forms=None)
    assert syntax.expected([tool]).kinds["f"].keys() == {"a"}
    source = calls_grammar([tool], "required", parallel=False, syntax=syntax)
    assert '"a"' in source


def referring(count: int, definitions: int) -> Tool:
    """Return a tool whose parameters refer to ``count`` definitions of 600 bytes each."""
    inner = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(20)}}
    parameters = {
        "$defs": {f"d{number}": inner for number in range(definitions)},
        "properties": {f"x{n}": {"$ref": f"#/$defs/d{n % definitions}"} for n in range(count)},
        "required": [f"x{n}" for n in range(count)],
    }
    return Tool(name="f", description=None, parameters=parameters)


def test_parameters_with_large_definitions_are_written_to_a_limit() -> None:
    """Each has all definitions with it: a tool of 200 KB was a grammar of 400 MB."""
    syntax = ToolSyntax(format=formats.QWEN_CODER, forms=None)
    source = calls_grammar([referring(4000, 1)], "required", parallel=False, syntax=syntax)
    assert source.count("%json") == 1 and source.count(")?") == 0
    large = calls_grammar([referring(3000, 150)], "required", parallel=False, syntax=syntax)
    assert MAX_SOURCE_CHARACTERS < len(large) < 4 * MAX_SOURCE_CHARACTERS, "refused as a whole"
