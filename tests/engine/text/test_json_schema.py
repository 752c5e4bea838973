"""Schemas are closed as a whole, and what cannot be followed is named with its place."""

import json

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.text.grammar import GrammarCompiler, translate, vocabulary_of
from baton.text.json_schema import ready, without_annotations
from baton.types.errors import GrammarError
from tests.soak import examples

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
TREE = {
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}
}


@pytest.fixture(scope="module")
def compiler(smollm):
    return GrammarCompiler(vocabulary_of(smollm, smollm.vocab_size, (2,)))


def fits(compiler, smollm, schema, value):
    matcher = compiler.compile(translate("json", json.dumps(schema)))
    ids = smollm.encode(json.dumps(value))
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (A, [{"a": 1}], [{"a": 1, "x": 2}]),
        ({**A, "additionalProperties": True}, [{"a": 1, "x": 2}], [{"x": 2}]),
        ({"type": "object"}, [{}, {"x": [1]}], []),
        (
            {"properties": {"in": A}, "required": ["in"]},
            [{"in": {"a": 1}}],
            [{"in": {"a": 1, "x": 2}}],
        ),
        ({"type": "array", "items": A}, [[{"a": 1}]], [[{"a": 1, "x": 2}]]),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, [{"a": 1}], [{"a": 1, "x": 2}]),
        ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "x": 2}]),
        ({"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "$defs": {"A": A}}, [None], [{}]),
        # Joined: the whole is closed, and no part forbids what another one names.
        ({"allOf": [A, B]}, [{"a": 1, "b": 2}], [{"a": 1}, {"a": 1, "b": 2, "x": 3}]),
        (
            {**B, "allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}},
            [{"b": 2, "a": 1}],
            [{"b": 2, "a": 1, "x": 3}, {"b": 2}],
        ),
        (
            {**B, "$ref": "#/$defs/A", "$defs": {"A": A}},
            [{"b": 2, "a": 1}],
            [{"b": 2, "a": 1, "x": 3}],
        ),
        ({**B, "anyOf": [A, {"required": ["b"]}]}, [{"b": 2, "a": 1}], []),
        (TREE, [{"v": 1, "next": {"v": 2, "next": None}}], [{"v": 1, "x": 1}]),
        # Said in other words:
        (
            {"propertyNames": {"enum": ["k"]}, "additionalProperties": {"type": "integer"}},
            [{"k": 1}],
            [{"x": 1}, {"k": "1"}],
        ),
        ({"type": "object", "propertyNames": {"pattern": "^k+$"}}, [{"kk": 1}], [{"x": 1}]),
        ({"type": "string", "format": "mood"}, ["glad"], [1]),
        ({**A, "unevaluatedProperties": False}, [{"a": 1}], [{"a": 1, "x": 1}]),
        ({"type": "array", "uniqueItems": False}, [[1, 1]], []),
    ],
)
def test_what_a_schema_lets_through(compiler, smollm, schema, good, bad):
    assert [fits(compiler, smollm, schema, value) for value in good] == [True] * len(good)
    assert [fits(compiler, smollm, schema, value) for value in bad] == [False] * len(bad)
    for value in good:
        jsonschema.validate(value, schema)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems at #/uniqueItems"),
        ({"properties": {"a": {"not": {"type": "string"}}}}, "not at #/properties/a/not"),
        ({"anyOf": [A, {"if": A, "then": B}]}, "if at #/anyOf/1/if"),
        ({"items": {"contains": {"type": "integer"}}}, "contains at #/items/contains"),
        ({**A, "dependentRequired": {"a": ["b"]}}, "dependentRequired at #/dependentRequired"),
        ({"propertyNames": {"minLength": 3}}, "propertyNames at #/propertyNames"),
    ],
)
def test_what_cannot_be_followed_is_named_with_its_place(compiler, smollm, schema, place):
    with pytest.raises(GrammarError, match=place):
        ready(schema)
    loose = {**schema, "x-guidance": {"lenient": True}}
    compiler.compile(translate("json", json.dumps(loose)))


def test_the_clients_own_schema_is_left_as_it_is():
    schema = {"allOf": [A, B]}
    before = json.dumps(schema)
    ready(schema)
    assert json.dumps(schema) == before


def test_references_that_are_joined_are_bounded():
    """Each level doubles the one below it."""
    levels = {f"L{i}": {"allOf": [{"$ref": f"#/$defs/L{i + 1}"}] * 2} for i in range(60)}
    with pytest.raises(GrammarError, match="references"):
        ready({"$ref": "#/$defs/L0", **A, "$defs": {**levels, "L60": A}})
    with pytest.raises(GrammarError, match="references"):
        ready({**A, "$ref": "#"})


WORDS = (
    *("type", "properties", "allOf", "anyOf", "$ref", "additionalProperties", "items", "format"),
    *("propertyNames", "enum", "required", "unevaluatedProperties", "if", "then", "not"),
    *("x-guidance", "$defs", "patternProperties", "contains", "a"),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["object", "#", "#/$defs/a"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=examples(300))
@given(JSON)
@example({"required": ["a"], "properties": None})
@example({"allOf": [{}, {"required": ["a"], "properties": [1]}]})
def test_nonsense_is_left_to_the_one_who_compiles(schema):
    try:
        ready(schema)
    except GrammarError as error:
        assert error.message


DESCRIBED = {
    "title": "city",
    "description": "A city",
    "$comment": "for a test",
    "type": "object",
    "properties": {
        "title": {"type": "string", "description": "of its mayor", "examples": ["Dr."]},
        "default": {"enum": [{"description": "kept: it is a value"}]},
        "size": {"$ref": "#/$defs/description"},
        "tags": {"type": "array", "items": {"type": "string", "title": "tag", "deprecated": True}},
    },
    "$defs": {"description": {"type": "integer", "default": 3, "readOnly": True}},
}
PLAIN = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "default": {"enum": [{"description": "kept: it is a value"}]},
        "size": {"$ref": "#/$defs/description"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "$defs": {"description": {"type": "integer"}},
}


def test_what_says_nothing_of_the_shape_is_left_out():
    """Names of properties, values and names of definitions stay, whatever they are called."""
    before = json.dumps(DESCRIBED)
    assert without_annotations(DESCRIBED) == PLAIN
    assert json.dumps(DESCRIBED) == before, "the schema of the client is another object"
    assert ready(DESCRIBED) == ready(PLAIN)
    assert without_annotations(True) is True
