"""Answers keep to a schema, a pattern or a grammar, in both modes, streamed or not."""

import asyncio
import json
import re

import jsonschema
import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, Field

from tests.e2e.fleet_processes import NAME, chat, text_of
from tests.e2e.test_parameters import complete

SCHEMAS = {
    "flat": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "people": {"type": "integer", "minimum": 0, "maximum": 9999},
            "capital": {"type": "boolean"},
        },
        "required": ["city", "people", "capital"],
        "additionalProperties": False,
    },
    "nested": {
        "$defs": {"kind": {"enum": ["cat", "dog", None]}},
        "type": "object",
        "properties": {
            "pets": {"type": "array", "items": {"$ref": "#/$defs/kind"}, "maxItems": 2},
            "at": {"type": "string", "format": "date"},
        },
        "required": ["at", "pets"],
        "additionalProperties": False,
    },
    "pattern": {"type": "string", "pattern": r"^[A-Z]{2}-\d{4}$"},
    "any of": {"anyOf": [{"const": 1.5}, {"type": "array", "items": {"const": 7}, "maxItems": 2}]},
}
MESSAGES = [{"role": "user", "content": "Tell me about Paris in France."}]


def ask(client, schema, **fields):
    wanted = {"name": "answer", "schema": schema, "strict": True}
    return client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        response_format={"type": "json_schema", "json_schema": wanted},
        **{"temperature": 0, "max_tokens": 90, **fields},
    )


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_validate(client, name):
    schema = SCHEMAS[name]
    for choice in ask(client, schema, temperature=1.5, seed=11, n=2).choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)


def test_streamed_and_whole_are_the_same(client):
    fields = {"temperature": 1.3, "seed": 5}
    whole = ask(client, SCHEMAS["pattern"], **fields).choices[0].message.content
    chunks = ask(client, SCHEMAS["pattern"], stream=True, **fields)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole


def test_the_mode_does_not_show(shared):
    found = []
    for mode in ("disaggregated", "colocated"):
        headers = {"x-baton-mode": mode}
        with OpenAI(base_url=f"{shared.url}/v1", api_key="x", default_headers=headers) as client:
            for schema, fields in (("flat", {}), ("nested", {"temperature": 1.4, "seed": 3})):
                answer = ask(client, SCHEMAS[schema], **fields)
                found.append((mode, [c.message.content for c in answer.choices]))
    assert [texts for mode, texts in found if mode == "disaggregated"] == [
        texts for mode, texts in found if mode == "colocated"
    ]


def test_the_official_client_parses_into_a_class(anywhere):
    class City(BaseModel):
        city: str = Field(max_length=12)
        capital: bool

    answer = anywhere.chat.completions.parse(
        model=NAME, messages=MESSAGES, response_format=City, temperature=0, max_tokens=60
    )
    assert isinstance(answer.choices[0].message.parsed, City)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_json": SCHEMAS["pattern"]}, r'"[A-Z]{2}-\d{4}"'),
        ({"guided_regex": r"\d{3}-\d{4}"}, r"\d{3}-\d{4}"),
        ({"guided_choice": ["red", "green or blue"]}, r"red|green or blue"),
        ({"guided_grammar": 'start: "<" /[a-z]{2,4}/ ">"'}, r"<[a-z]{2,4}>"),
        ({"guided_grammar": 'root ::= [0-9] [0-9] "!"'}, r"\d\d!"),
        ({"structured_outputs": {"regex": "(ab){2}"}}, r"abab"),
    ],
)
def test_vllms_names_on_completions(anywhere, extra, pattern):
    fields = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 30}
    answer = anywhere.completions.create(**fields, temperature=1.2, seed=8, extra_body=extra)
    assert re.fullmatch(pattern, answer.choices[0].text)
    assert answer.choices[0].finish_reason == "stop"


def test_a_cut_answer_says_so(anywhere):
    answer = ask(
        anywhere, {"type": "array", "minItems": 50, "items": {"type": "integer"}}, n=1, max_tokens=9
    )
    assert answer.choices[0].finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer.choices[0].message.content)


def test_beside_other_parameters(anywhere):
    digits = {"extra_body": {"guided_regex": "[0-9]+", "ignore_eos": True}}
    answer = anywhere.completions.create(model=NAME, prompt="1, 2, 3,", max_tokens=6, **digits)
    assert answer.usage.completion_tokens == 6
    yes = {"guided_regex": "yes", "min_tokens": 20, "ignore_eos": True}
    answer = anywhere.completions.create(
        model=NAME, prompt="Is it?", extra_body=yes, logprobs=1, max_tokens=30
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("yes", "stop")
    assert all(value < 0 for value in answer.choices[0].logprobs.token_logprobs)
    stopped = complete(anywhere, stop=["4"], guided_regex="[0-3]45")
    assert "4" not in stopped.choices[0].text
    assert stopped.choices[0].finish_reason == "stop"


async def test_a_bad_schema_is_a_400_while_others_stream(shared):
    calm = chat("Tell me a long story.", max_tokens=40, ignore_eos=True)
    before = await text_of(shared.url, calm)
    stream = asyncio.create_task(text_of(shared.url, calm))
    deep = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(2500)) + '\nr2500: "b"'
    with OpenAI(base_url=f"{shared.url}/v1", api_key="none") as client:
        for extra in ({"guided_json": {"type": "bogus"}}, {"guided_grammar": deep}):
            with pytest.raises(BadRequestError) as caught:
                await asyncio.to_thread(complete, client, **extra)
            assert caught.value.param == next(iter(extra))
    assert not stream.done()
    assert await stream == before
    shared.assert_baseline()
