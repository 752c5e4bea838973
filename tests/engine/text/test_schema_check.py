"""What a finished answer is compared with, and how much work that may be."""

import json

import pytest

from baton.text.schema_check import violations


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
def test_what_is_found(schema, good, bad, keyword):
    assert violations(json.dumps(schema), json.dumps(good)) == ()
    assert violations(json.dumps(schema), json.dumps(bad)) == (keyword,)


def test_what_grammars_follow_is_not_looked_at_again():
    schema = {"properties": {"a": {"type": "integer", "pattern": "(x+x+)+y"}}, "uniqueItems": True}
    assert violations(json.dumps(schema), '{"a": "' + "x" * 60 + '"}') == ()


def test_a_check_is_given_up_in_time():
    levels = {f"L{i}": {"allOf": [{"$ref": f"#/$defs/L{i + 1}"}] * 2} for i in range(60)}
    schema = {"not": {"$ref": "#/$defs/L0"}, "$defs": {**levels, "L60": {"type": "integer"}}}
    assert violations(json.dumps(schema), "1") == ("unchecked",)
    assert violations('{"$ref": "http://example.org/x", "not": {}}', "1") == ("unchecked",)
    assert violations('{"$ref": "#"}', "1") == ("unchecked",)
    assert violations('{"uniqueItems": true}', f"[{'1,' * 40000}1]") == ("unchecked",)
    assert violations('{"type": 5, "not": 5}', "1") == ("unchecked",)
