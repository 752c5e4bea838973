"""Schemas and expressions of clients that finished answers are compared with."""

import json

import pytest

from baton.text.answer_check import Match, answered, violations


@pytest.mark.parametrize(
    ("schema", "good", "bad", "keyword"),
    [
        (
            {"uniqueItems": True},
            [1, "1", [1], {"a": 1, "b": 2}],
            [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
            "uniqueItems",
        ),
        ({"items": {"contains": {"const": 5}}}, [[1, 5]], [[1]], "contains"),
        ({"not": {"type": "string"}}, 1, "x", "not"),
        ({"const": 2**70}, 2**70, 1, "const"),
        ({"enum": [1e300, 12345678901234567]}, 1e300, 2, "enum"),
        ({"dependentRequired": {"a": ["b"]}}, {"a": 1, "b": 2}, {"a": 1}, "dependentRequired"),
        ({"propertyNames": {"maxLength": 1}}, {"a": 1}, {"aa": 1}, "propertyNames"),
        (
            {"$ref": "#/$defs/u", "$defs": {"u": {"uniqueItems": True}}},
            [1, 2],
            [1, 1],
            "uniqueItems",
        ),
    ],
)
def test_keywords_that_an_answer_violates(schema, good, bad, keyword):
    assert violations(json.dumps(schema), json.dumps(good)) == []
    assert violations(json.dumps(schema), json.dumps(bad)) == [keyword]


def test_keywords_of_the_grammar_are_not_checked_again():
    schema = {"properties": {"a": {"type": "integer", "pattern": "(x+x+)+y"}}, "uniqueItems": True}
    assert violations(json.dumps(schema), '{"a": "' + "x" * 60 + '"}') == []


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        ('{"$ref": "http://example.org/x", "not": {}}', "1"),
        ('{"$ref": "#"}', "1"),
        ('{"uniqueItems": true}', "[1,"),
        ('{"type": 5, "not": 5}', "1"),
        ("{", "1"),
    ],
)
def test_an_answer_that_cannot_be_compared_is_unchecked(schema, answer):
    assert violations(schema, answer) == ["unchecked"]


@pytest.mark.parametrize(
    ("match", "problem"),
    [
        (Match("Paris.", regex="^Par.s"), ""),
        (Match("London", regex="^Par.s"), "the text does not match '^Par.s'"),
        (Match('{"a": 1}', schema='{"required": ["a"]}'), ""),
        (Match("{}", schema='{"required": ["a"]}'), "the text does not follow the schema at $"),
        (Match("no", schema='{"required": ["a"]}'), "the text is no JSON"),
        (Match("1", schema='{"$ref": "file:///etc/passwd"}'), "a reference that does not lead"),
    ],
)
def test_problem_of_an_answer(match, problem):
    found = answered(match).texts
    assert len(found) == bool(problem)
    assert all(problem in text for text in found)
