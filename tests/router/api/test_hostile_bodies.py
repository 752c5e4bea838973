"""Values that no client should send, in places that take any: an answer or a 4xx, and no fault."""

import json

from baton.types.errors import MAX_MESSAGE_CHARS, InvalidRequestError
from tests.router.conftest import MODEL, until
from tests.router.emulated_worker import Script

VALUES = [
    *("1e400", "-1e400", "NaN", "Infinity", "9" * 4000, "9" * 6000, "1e-400", "-0"),
    *("9223372036854775808", "18446744073709551616", "null", "true", "[]", "{}", "[null]"),
    *(r'"\ud800"', r'"\udfff\ud800"', r'"\u0000"', '""', json.dumps("a" * 70_000)),
    *("[" * 150 + "]" * 150, '{"a":' * 150 + "1" + "}" * 150, r'{"\u0000":1}', '{"":""}'),
    *('{"type":1e400}', '{"maximum":1e400}', '{"enum":[1e400]}', '{"const":' + "9" * 4000 + "}"),
    *(f'{{"type":"integer","maximum":{"9" * 4000}}}', f'{{"minimum":-{"9" * 4000}}}'),
    *('{"$ref":"#"}', '{"$ref":"http://x"}', '{"pattern":"("}', '{"type":"object"}'),
]
_USER = '[{"role":"user","content":"hi"}]'
_CHAT = f'"model":"{MODEL}","messages":{_USER},"max_tokens":1,'
_RESPONSE = f'"model":"{MODEL}","input":"hi","max_output_tokens":1,'
_SCHEMA = '{"type":"object","properties":{"x":VALUE}}'
_TOOL = f'"type":"function","function":{{"name":"a","parameters":{_SCHEMA}'
PLACES = {
    "tool": ("/v1/chat/completions", _CHAT + f'"tools":[{{{_TOOL}}}}}]'),
    "lenient tool": ("/v1/chat/completions", _CHAT + f'"tools":[{{{_TOOL},"strict":false}}}}]'),
    "schema": (
        "/v1/chat/completions",
        f'{_CHAT}"response_format":{{"type":"json_schema","json_schema":{{"schema":{_SCHEMA}}}}}',
    ),
    "template": ("/v1/chat/completions", _CHAT + '"chat_template_kwargs":{"x":VALUE,"y":VALUE}'),
    "bias": ("/v1/chat/completions", _CHAT + '"logit_bias":{"5":VALUE}'),
    "seed": ("/v1/chat/completions", _CHAT + '"seed":VALUE,"temperature":VALUE'),
    "response tool": (
        "/v1/responses",
        f'{_RESPONSE}"tools":[{{"type":"function","name":"a","parameters":{_SCHEMA}}}]',
    ),
    "metadata": ("/v1/responses", _RESPONSE + '"metadata":{"x":VALUE}'),
    "message tool": (
        "/v1/messages",
        f'{_CHAT}"tools":[{{"name":"a","input_schema":{_SCHEMA}}}]',
    ),
    "user": ("/v1/messages", _CHAT + '"metadata":{"user_id":VALUE}'),
    "input": ("/v1/embeddings", f'"model":"{MODEL}","input":VALUE'),
    "tokens": ("/detokenize", '"tokens":VALUE'),
}


async def test_no_value_is_a_fault(make_fleet):
    fleet = await make_fleet({"decode-0": Script(step_s=0.001)})
    for place in PLACES:
        path, fields = PLACES[place]
        for value in VALUES:
            for stream in ("false", "true"):
                body = "{" + fields.replace("VALUE", value) + f',"stream":{stream}' + "}"
                answer = await fleet.http.post(path, content=body.encode())
                assert answer.status_code < 500, (value[:60], answer.text[:200])
        await until(lambda: fleet.lane.gateway.in_flight == 0)


async def test_a_long_key_of_an_object_is_not_in_the_error_that_the_router_keeps(make_fleet):
    """2,048 kept errors with a key of 4 MB each, which is 4 KB of gzip, took 20 GB."""
    fleet = await make_fleet({})
    for path, field, value in (
        ("/v1/completions", "logit_bias", {}),
        ("/v1/responses", "metadata", 5),
        ("/v1/batches", "metadata", 5),
    ):
        body = {"model": MODEL, "prompt": "hi", "input": "hi", field: {"k" * 100_000: value}}
        refused = await fleet.http.post(path, json=body)
        assert refused.status_code in (400, 503)
        assert len(refused.content) < 1000
    assert all(len(str(kept.report)) < 3000 for kept in fleet.router.refused.newest_first())


def test_an_error_repeats_little_of_a_long_value():
    """`DELETE /fleet/keys/KKK…` and other calls of operators repeated 60 KB to 200 KB."""
    error = InvalidRequestError.at("limits", "K" * 200_000)
    assert len(error.message) == len(str(error)) == MAX_MESSAGE_CHARS
