"""The judge itself: it finds what it should, at the field at fault."""

import pytest

from tests.conformance.judge import Judge

SCHEMAS = {
    "Base": {"properties": {"id": {"type": "string"}}, "required": ["id"]},
    "Text": {
        "allOf": [
            {"$ref": "#/$defs/Base"},
            {"properties": {"type": {"const": "text"}, "text": {"type": "string"}}},
        ]
    },
    "Number": {
        "type": "object",
        "properties": {
            "type": {"enum": ["number"]},
            "value": {"type": "integer", "nullable": True},
        },
        "required": ["type", "value"],
    },
    "List": {
        "type": "object",
        "properties": {
            "items": {
                "type": "array",
                "items": {"oneOf": [{"$ref": "#/$defs/Text"}, {"$ref": "#/$defs/Number"}]},
            },
            "free": {"type": "object", "additionalProperties": {"type": "string"}},
        },
    },
}
GOOD = {
    "items": [{"id": "a", "type": "text", "text": "x"}, {"type": "number", "value": None}],
    "free": {"any": "text"},
}


@pytest.mark.parametrize(
    ("items", "free", "expected"),
    [
        ([], {}, []),
        ([{"id": "a", "type": "text", "more": 1}], {}, [("/items/*/more", "unknown")]),
        ([{"type": "text", "text": "x"}], {}, [("/items/*/id", "missing")]),
        ([{"id": None, "type": "text"}], {}, [("/items/*/id", "null")]),
        ([{"type": "number", "value": "1"}], {}, [("/items/*/value", "type")]),
        ([{"type": "number"}], {}, [("/items/*/value", "missing")]),
        ([{"type": "other"}], {}, [("/items/*/type", "enum")]),
        ([{"type": "number", "value": 1, "id": "a"}], {}, [("/items/*/id", "unknown")]),
        ([], {"any": 5}, [("/free/any", "type")]),
    ],
)
def test_a_finding_is_at_the_field_at_fault(items, free, expected):
    judge = Judge(SCHEMAS, "#/$defs/")
    assert judge.findings(GOOD, "List") == []
    findings = judge.findings({"items": items, "free": free}, "List")
    assert [(finding.at, finding.what) for finding in findings] == expected
