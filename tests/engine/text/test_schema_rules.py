"""Schemas whose rules llguidance would change: numbers, alternatives, references, required names.

Each is compiled, and texts are matched byte by byte.
"""

import json
from collections.abc import Iterable
from typing import Any

import pytest

from baton.text.calls.values import kinds_of
from baton.text.grammar import GrammarCompiler, Vocabulary, translate
from baton.text.json_schema import lenient, unenforced
from baton.text.schemas.one_of import Comparison, excludes
from baton.text.schemas.references import target
from baton.types.errors import GrammarError

END = 256
COMPILER = GrammarCompiler(Vocabulary([bytes([i]) for i in range(END)] + [b"<end>"], [END], [END]))
INT64 = 2**63
BEYOND_DOUBLES = 10**310


def accepted(schema: Any, texts: Iterable[str]) -> list[str]:
    matcher = COMPILER.compile(translate("json", json.dumps(schema)))
    found = []
    for text in texts:
        tokens = [*text.encode(), END]
        if matcher.deep_copy().validate_tokens(tokens) == len(tokens):
            found.append(text)
    return found


def test_a_large_integer_by_itself_is_written_exactly() -> None:
    near = [str(2**53 + i) for i in range(-2, 4)]
    for value in (2**53 + 1, -(2**53) - 1, -INT64, INT64, 10**23 + 1):
        shown = str(value)
        assert accepted({"const": value}, {*near, shown}) == [shown]
        assert accepted({"type": "integer", "enum": [value, 1]}, ["1", shown, "2"]) == ["1", shown]


@pytest.mark.parametrize(
    "value", [2**53, 2**60, INT64 - 1, 10**23, 0, -7, 0.1, -0.5, 1e-7, 0.30000000000000004]
)
def test_numbers_that_are_read_exactly_stay(value: float) -> None:
    schema = {"properties": {"a": {"const": value}}, "required": ["a"], "type": "object"}
    shown = f"{value:.20f}".rstrip("0") if value == 1e-7 else str(value)
    assert accepted(schema, [f'{{"a": {shown}}}']) == [f'{{"a": {shown}}}']


INSIDE = [
    ("properties", lambda part: {"type": "object", "properties": {"a": part}}, "#/properties/a"),
    ("items", lambda part: {"type": "array", "items": part}, "#/items"),
    ("prefixItems", lambda part: {"type": "array", "prefixItems": [part]}, "#/prefixItems/0"),
    ("anyOf", lambda part: {"anyOf": [{"type": "null"}, part]}, "#/anyOf/1"),
    ("$defs", lambda part: {"$ref": "#/$defs/x", "$defs": {"x": part}}, "#/$defs/x"),
    (
        "additionalProperties",
        lambda part: {"type": "object", "additionalProperties": part},
        "#/additionalProperties",
    ),
]
CHANGED = [
    ("const", {"const": 2**53 + 1}),
    ("const", {"const": {"deep": [-(2**53) - 1]}}),
    ("const", {"const": -INT64}),
    ("const", {"const": 2**64}),
    ("const", {"const": float("inf")}),
    ("enum", {"enum": [1, 2**53 + 1]}),
    ("enum", {"enum": ["a", INT64]}),
    ("minimum", {"type": "integer", "minimum": INT64, "maximum": 2**64 - 1}),
    ("minimum", {"type": "number", "minimum": 1e19}),
    ("maximum", {"type": "integer", "maximum": -INT64 * 4}),
    ("minimum", {"type": "integer", "minimum": BEYOND_DOUBLES}),
    ("maximum", {"type": "number", "maximum": -BEYOND_DOUBLES}),
    ("minLength", {"type": "string", "minLength": INT64}),
    ("minItems", {"type": "array", "minItems": 2**64}),
    ("multipleOf", {"type": "integer", "multipleOf": 2**53 + 1}),
    ("multipleOf", {"type": "integer", "multipleOf": 2**32 - 1}),
    ("multipleOf", {"type": "number", "multipleOf": 0.123456789}),
]


@pytest.mark.parametrize(("keyword", "part"), CHANGED, ids=str)
def test_a_number_that_would_change_is_refused_by_keyword_and_place(
    keyword: str, part: dict[str, Any]
) -> None:
    for _, wrap, place in INSIDE:
        with pytest.raises(GrammarError, match=f"keyword {keyword} at ") as caught:
            translate("json", json.dumps(wrap(part)))
        assert f"{place}/{keyword} cannot" in caught.value.message
        assert keyword in unenforced(wrap(part))
    relaxed = lenient({"type": "object", "properties": {"a": part, "b": {"const": "x"}}})
    texts = ['{"b": "x"}', '{"b": "y"}']
    assert accepted(relaxed, texts) == ['{"b": "x"}']


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"minimum": -INT64, "maximum": INT64 - 1}, [0, -(2**62), INT64 - 1], [INT64, -INT64 - 1]),
        ({"minimum": -INT64}, [5, -5], [-INT64 - 1]),
        ({"minimum": 0, "maximum": 2**64 - 1}, [0, 10**18 + 1], [-1, 2**64]),
        ({"maximum": 18446744073709552000}, [-5, 10**18 + 1], [18446744073709552001]),
        ({"exclusiveMinimum": 2**53, "maximum": 2**53 + 2}, [2**53 + 2], [2**53, 2**53 + 3]),
        ({"minimum": 2**53 + 1}, [2**53 + 2, 2**60], [2**53]),
        ({"type": ["integer", "null"], "maximum": INT64 - 1}, [10**18 + 1], [INT64]),
        ({"exclusiveMaximum": 2**53 + 2}, [2**53], [2**53 + 2, 2**53 + 1 + 2]),
        ({"exclusiveMinimum": 2**62}, [2**62 + 2048], [2**62]),
        ({"minimum": 10**18, "exclusiveMaximum": 1e400}, [10**18 + 5], [10**17]),
        ({"minimum": 1e3, "maximum": 2000.0}, [1000, 2000], [999, 2001]),
        ({"minimum": 5, "maximum": BEYOND_DOUBLES}, [5], [4]),
    ],
    ids=str,
)
def test_bounds_of_integers_hold(
    schema: dict[str, Any], inside: list[int], outside: list[int]
) -> None:
    texts = list(map(str, [*inside, *outside]))
    assert accepted({"type": "integer", **schema}, texts) == list(map(str, inside))


@pytest.mark.parametrize(
    ("schema", "inside", "outside"),
    [
        ({"maximum": 18446744073709552000}, ["5", "0.5", "-3"], ["18446744073709552001"]),
        ({"minimum": -(3.4028235e38), "maximum": 3.4028235e38}, ["1.5", "1000000"], ["1" * 40]),
        ({"minimum": 2**53 + 1}, [str(10**17)], [str(2**53), f"{2**53}.5"]),
        ({"minimum": 0.1, "maximum": 0.3}, ["0.1", "0.2"], ["0.09", "0.31"]),
        ({"maximum": 1e400}, ["5"], []),
        ({"minimum": -BEYOND_DOUBLES, "maximum": 5}, ["5"], ["6"]),
    ],
    ids=str,
)
def test_bounds_of_numbers_hold(
    schema: dict[str, Any], inside: list[str], outside: list[str]
) -> None:
    assert accepted({"type": "number", **schema}, [*inside, *outside]) == inside


def test_limits_that_no_answer_reaches_are_left_out() -> None:
    for most in (INT64, 2**64, 2**32, 1e30):
        schema = {"type": "string", "maxLength": most, "minLength": 1.0}
        assert accepted(schema, ['""', '"a"']) == ['"a"']
        assert accepted({"type": "array", "maxItems": most}, ["[]"]) == ["[]"]


T = {"type": "object", "properties": {"t": {"const": "a"}}, "required": ["t"]}
U = {"type": "object", "properties": {"t": {"const": "b"}, "n": {}}, "required": ["t"]}


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"oneOf": [{"const": 1}, {"const": 2}]}, ["1", "2"]),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]}, ["1", "null"]),
        ({"oneOf": [T, U]}, ['{"t": "a"}', '{"t": "b", "n": 1}']),
        ({"oneOf": [{"$ref": "#/$defs/T"}, U], "$defs": {"T": T}}, ['{"t": "a"}', '{"t": "b"}']),
        ({"anyOf": [{"type": "integer"}], "oneOf": [{"enum": [1]}, {"enum": [2]}]}, ["2"]),
    ],
)
def test_alternatives_that_exclude_each_other_are_followed(
    schema: dict[str, Any], texts: list[str]
) -> None:
    assert accepted(schema, texts) == texts
    assert unenforced(schema) == []


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "integer"}, {"type": "number"}],
        [{"required": ["a"]}, {"required": ["b"]}],
        [{"const": 1}, {"const": 1.0}],
        [{"type": "string", "maxLength": 3}, {"type": "string"}],
        [T, {"type": "object"}],
    ],
    ids=str,
)
def test_other_alternatives_are_refused_in_our_own_words(branches: list[Any]) -> None:
    inner = {"type": "array", "items": {"oneOf": branches}}
    with pytest.raises(GrammarError, match=r"oneOf at #/items/oneOf .* strict: false"):
        translate("json", json.dumps(inner))
    assert unenforced(inner) == ["oneOf"]
    assert accepted(lenient(inner), ["[]"]) == ["[]"]


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("Page[int]", "#/$defs/Page[int]"),
        ("Page[int]", "#/$defs/Page%5Bint%5D"),
        ("Page<a b>", "#/$defs/Page<a b>"),
        ("é", "#/$defs/é"),
        ("a/b", "#/$defs/a/b"),
        ("a/b", "#/$defs/a~1b"),
        ("a~b", "#/$defs/a~0b"),
        ("a~b", "#/$defs/a~b"),
        ("100%", "#/$defs/100%"),
        ("a%20b", "#/$defs/a%20b"),
        ('"{}|^`\\', '#/$defs/"{}|^`\\'),
    ],
)
def test_a_reference_may_name_a_definition_literally(name: str, reference: str) -> None:
    five = {name: {"const": 5}}
    assert accepted({"$ref": reference, "$defs": five}, ["5", "6"]) == ["5"]
    joined = {"type": "object", "properties": {"a": {"$ref": reference}}, "$defs": five}
    assert accepted(joined, ['{"a": 5}', '{"a": 6}']) == ['{"a": 5}']


def test_a_name_that_only_required_gives_may_have_any_value() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["red", "blue"]}},
        "required": ["a", "b"],
    }
    right = ['{"a": "red", "b": 1}', '{"a": "blue", "b": {"x": []}}']
    wrong = ['{"a": "red"}', '{"a": "pink", "b": 1}', '{"a": "red", "b": 1, "c": 1}']
    assert accepted(schema, [*right, *wrong]) == right
    split = {"allOf": [{"properties": schema["properties"]}, {"required": ["a", "b"]}]}
    assert accepted({"type": "object", **split}, [*right, *wrong]) == right


def referring(count: int, *more: Any) -> dict[str, Any]:
    """Return parameters of which one refers to itself ``count`` times."""
    return {"properties": {"x": {"anyOf": [*({"$ref": "#/properties/x"},) * count, *more]}}}


@pytest.mark.parametrize(
    ("parameters", "kind"),
    [
        (referring(20), "mixed"),
        (referring(20, {"type": "integer"}), "json"),
        (referring(20, {"type": "string"}), "text"),
        (referring(20, {"type": "string"}, {"const": 1}), "mixed"),
        (referring(20, {"type": "integer"}, True), "mixed"),
        (referring(0, *({"type": "integer"} for _ in range(100))), "mixed"),
    ],
)
def test_a_schema_that_refers_to_itself_is_read_once(parameters: dict[str, Any], kind: str) -> None:
    """It was read once for each way to a part: 400 bytes held the router for minutes."""
    assert kinds_of(parameters) == {"x": kind}


def test_alternatives_that_refer_to_themselves_are_compared_to_a_limit() -> None:
    names = [f"p{number}" for number in range(20)]
    node = {"type": "object", "required": names, "properties": {n: {"$ref": "#"} for n in names}}
    comparison = Comparison(lambda _: node)
    for _ in range(5000):  # of one schema, which share the limit
        assert not excludes({"oneOf": [node, node]}, comparison)
    many = [{"enum": [*range(500 * n, 500 * n + 500)]} for n in range(64)]
    assert not excludes({"oneOf": many}, Comparison(lambda _: None))
    assert excludes({"oneOf": many[:4]}, Comparison(lambda _: None))


@pytest.mark.parametrize("reference", ["#" + "/a" * 200_000, "#/anyOf/" + "1" * 5000])
def test_long_references_lead_nowhere(reference: str) -> None:
    assert target({"anyOf": [{}]}, reference) is None


def test_names_with_slashes_are_found() -> None:
    assert target({"a/b/c": [{"d": 1}]}, "#/a/b/c/0/d") == 1
