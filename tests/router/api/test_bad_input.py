"""What is refused: by name, with OpenAI's body, never clamped."""

import json
from dataclasses import replace

import pytest

from baton.config.clients import ApiKeyConfig
from baton.types.errors import InvalidRequestError
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.completion import CompletionBody
from router.frontend.api.bodies.embedding import EmbeddingBody
from router.frontend.api.bodies.generate import GenerateBody
from router.frontend.api.bodies.parse import parse
from router.frontend.api.bodies.tokens import DetokenizeBody
from router.served_model import ServedModel
from tests.router.conftest import MODEL
from tests.router.emulated_worker import Script

USER = [{"role": "user", "content": "hi"}]

BAD_CHAT = [
    ({"stream": "maybe"}, "stream"),
    ({"stream": 2}, "stream"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 33}, "n"),
    ({"n": 1.5}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e39}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 49153}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "one"}, "seed"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [49152]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"logit_bias": {"49152": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"000000000000999999": 1}}, "logit_bias"),
    ({"logit_bias": {"05": 1, "5": 2}}, "logit_bias"),
    ({"logit_bias": {"0" * 12 + "9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-46}, "repetition_penalty"),
    ({"repetition_penalty": 101}, "repetition_penalty"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 8192}, "max_tokens"),
    ({"max_completion_tokens": 8192}, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"ignore_eos": "never"}, "ignore_eos"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
    ({"priority": 2**31}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"user": 5}, "user"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"reasoning_effort": "mild"}, "reasoning_effort"),
    ({"allowed_token_ids": [5]}, "allowed_token_ids"),
    ({"tool_choice": {"type": "allowed"}}, "tool_choice"),
    ({"echo": True}, "echo"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [*USER, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [*USER, {"role": "assistant", "audio": {"id": "a"}}]}, "messages[1].audio"),
    ({"messages": [{"role": "user", "content": "x", "prefix": True}]}, "messages[0].prefix"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].image_url",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "a"}]}]},
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": ["a", {"type": "input_audio"}]}]},
        "messages[0].content[1].type",
    ),
    ({"model": 5}, "model"),
    ({"model": ""}, "model"),
]

BAD_COMPLETION = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [49152]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[0]"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"prompt": "hi " * 9000}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"max_tokens": 0, "echo": True}, "max_tokens"),
    ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"num_beams": 4}, "num_beams"),
    ({"length_penalty": 0.8}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
    ({"suffix": "x"}, "suffix"),
    ({"messages": USER}, "messages"),
    ({"echo": True, "truncate_prompt_tokens": 3}, "echo"),
]


@pytest.fixture
async def fleet(make_fleet):
    return await make_fleet({"decode-0": Script(step_s=0)})


def check_problem(response, status: int, param: str | None) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["message"]
    return error


async def test_bad_chat_parameters_are_named(fleet):
    for change, param in BAD_CHAT:
        response = await fleet.http.post(
            "/v1/chat/completions", json={"model": MODEL, "messages": USER} | change
        )
        error = check_problem(response, 400, param)
        assert error["type"] == "invalid_request_error", change
    assert not fleet.workers["decode-0"].submissions


async def test_bad_completion_parameters_are_named(fleet):
    for change, param in BAD_COMPLETION:
        response = await fleet.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "hi"} | change
        )
        check_problem(response, 400, param)
    assert not fleet.workers["decode-0"].submissions


async def test_neutral_values_of_unsupported_parameters_are_accepted(fleet):
    neutral = {
        "tools": None,
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "metadata": {"a": "b"},
        "store": False,
        "modalities": ["text"],
        "service_tier": "auto",
        "reasoning_effort": None,
        "temperature": None,
        "stop": None,
        "max_completion_tokens": 4,
        "messages": [
            {"role": "system", "content": "Be brief."},
            *USER,
            {"role": "assistant", "content": "hello", "refusal": None, "tool_calls": None},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
        ],
    }
    assert (await fleet.chat(**neutral)).status_code == 200
    no_beams = {"best_of": 2, "use_beam_search": False, "num_beams": 1, "length_penalty": 1.0}
    response = await fleet.complete(
        n=2, suffix=None, max_tokens=1, early_stopping=False, **no_beams
    )
    assert response.status_code == 200


async def test_beam_search_is_refused_with_what_to_use_in_its_place(fleet):
    error = (await fleet.chat(use_beam_search=True)).json()["error"]
    assert "beam search" in error["message"]
    assert "several answers" in error["message"]


async def test_messages_and_text_parts_reach_the_prompt(fleet, model):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    await fleet.chat(messages=messages)
    sent = fleet.workers["decode-0"].submissions[0].prompt_tokens
    ids = [int.from_bytes(sent[i : i + 4], "little") for i in range(0, len(sent), 4)]
    assert model.tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_a_prompt_too_long_is_told_with_the_numbers(fleet):
    error = check_problem(await fleet.complete("hi " * 9000), 400, "prompt")
    assert error["code"] == "context_length_exceeded"
    assert "8192" in error["message"]
    assert "900" in error["message"]


@pytest.mark.parametrize("raw", [b"{", b"[]", b"", b'{"model": NaN}', b"\xff\xfe"])
async def test_malformed_json_is_400(fleet, raw):
    response = await fleet.http.post("/v1/chat/completions", content=raw)
    check_problem(response, 400, None)


async def test_bodies_over_4_mib_are_413(fleet):
    big = b'{"model": "' + b"x" * (4 * 1024 * 1024) + b'"}'
    response = await fleet.http.post("/v1/chat/completions", content=big)
    assert check_problem(response, 413, None)["code"] == "payload_too_large"

    async def pieces():
        for _ in range(70):
            yield b" " * 65536

    response = await fleet.http.post("/v1/chat/completions", content=pieces())
    check_problem(response, 413, None)


async def test_unknown_paths_methods_and_models_have_openais_body(fleet):
    check_problem(await fleet.http.get("/nothing"), 404, None)
    check_problem(await fleet.http.get("/v1/chat/completions"), 405, None)
    check_problem(await fleet.http.get("/v1/models/other"), 404, "model")
    check_problem(await fleet.http.get("/fleet/requests/other"), 404, None)
    error = check_problem(await fleet.chat(model="other"), 404, "model")
    assert error["code"] == "model_not_found"
    assert (await fleet.chat(model="alias")).json()["model"] == "alias"


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-baton-mode", "fast"),
        ("x-baton-timeout-ms", "0"),
        ("x-baton-timeout-ms", "soon"),
        ("x-baton-timeout-ms", "86400001"),
        ("x-baton-tenant", "a b"),
        ("x-baton-tenant", ""),
    ],
)
async def test_bad_headers_are_named(fleet, header, value):
    check_problem(await fleet.chat(headers={header: value}), 400, header)


async def test_api_keys_name_tenants(make_fleet):
    fleet = await make_fleet(
        {"decode-0": None}, api_keys={"sk-one-key": ApiKeyConfig(tenant="one")}
    )
    refused = check_problem(await fleet.chat(), 401, None)
    assert refused["code"] == "invalid_api_key"
    for wrong in ("Bearer sk-other", "sk-one-key", "Basic sk-one-key"):
        check_problem(await fleet.chat(headers={"authorization": wrong}), 401, None)
    check_problem(await fleet.http.get("/v1/models"), 401, None)
    headers = {"authorization": "Bearer sk-one-key", "x-baton-tenant": "other"}
    assert (await fleet.chat(headers=headers)).status_code == 200
    assert fleet.workers["decode-0"].submissions[0].tenant == "one"
    assert (await fleet.http.get("/health/live")).status_code == 200


async def test_a_model_without_template_cannot_chat(make_fleet, artifact):
    base = ServedModel(replace(artifact, chat_template=None), ("base",))
    fleet = await make_fleet({"decode-0": None}, served=base)
    error = check_problem(await fleet.chat(model="base"), 400, "messages")
    assert "no chat template" in error["message"]
    assert (await fleet.complete(model="base")).status_code == 200


async def test_a_decimal_that_would_change_is_refused_by_its_place(make_fleet):
    fleet = await make_fleet({"decode-0": None})
    for number in (
        *("0.12345678901234567", "1234567890123456.7", "1.00000000000000000001e2"),
        *("1e-400", "1e9999999999999999999", "1E-9999999999999999999"),
    ):
        deep = '{"properties": {"a": {"enum": [1, {"x": NUMBER}]}}}'.replace("NUMBER", number)
        user = '"messages": [{"role": "user", "content": "hi"}]'
        tool = (
            f'"tools": [{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}]'
        )
        answer = (
            f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {deep}}}}}'
        )
        claude = f'"tools": [{{"name": "f", "input_schema": {deep}}}], "max_tokens": 5'
        for path, fields in (
            ("chat/completions", f"{user}, {tool}"),
            ("chat/completions", f"{user}, {answer}"),
            ("completions", f'"prompt": "x", "guided_json": {deep}'),
            ("completions", f'"prompt": "x", "guided_json": {json.dumps(deep)}'),
            ("completions", f'"prompt": "x", "structured_outputs": {{"json": {json.dumps(deep)}}}'),
            ("messages", f"{user}, {claude}"),
        ):
            raw = f'{{"model": "{MODEL}", {fields}}}'
            found = await fleet.http.post(f"/v1/{path}", content=raw)
            assert found.status_code == 400, found.text
            assert "properties.a.enum[1].x" in found.text
        fine = user.replace("hi", f'{{\\"const\\": {number}}}')
        found = await fleet.http.post(
            "/v1/chat/completions", content=f'{{"model": "{MODEL}", "max_tokens": 2, {fine}}}'
        )
        assert found.status_code == 200, found.text


async def test_a_bound_that_would_change_is_refused_by_its_place(make_fleet):
    """`9007199254740993.0` allowed `9007199254740992`."""
    fleet = await make_fleet({"decode-0": None})
    for keyword in ("minimum", "exclusiveMaximum", "multipleOf"):
        raw = (
            f'{{"model": "{MODEL}", "prompt": "x", "guided_json": {{"NAME": 9007199254740993.0}}}}'
        )
        found = await fleet.http.post("/v1/completions", content=raw.replace("NAME", keyword))
        assert found.status_code == 400, found.text
        assert f"guided_json.{keyword}" in found.text


async def test_a_text_with_a_token_that_the_model_lacks_is_refused(make_fleet, artifact, caplog):
    """It ended the engine of one worker after the other."""
    config = replace(artifact.config, vocab_size=49_000)
    served = ServedModel(replace(artifact, config=config), ("small",))
    assert "152 tokens outside the model's vocabulary" in caplog.text
    fleet = await make_fleet({"decode-0": None}, served=served)
    last = served.tokenizer.token_text(49_100)
    assert served.tokenizer.encode(last) == [49_100]
    chat = {"messages": [{"role": "user", "content": last}]}
    calls = {
        "/v1/completions": [{"prompt": last}, {"prompt": ["a", last]}, {"prompt": [49_000]}],
        "/v1/chat/completions": [
            chat,
            {"messages": [{"role": "user", "content": "hi"}], "bad_words": [last]},
            {"messages": [{"role": "user", "content": "hi"}], "stop_token_ids": [49_100]},
            {"messages": [{"role": "user", "content": "hi"}], "logit_bias": {"49100": 1}},
        ],
        "/v1/messages": [{**chat, "max_tokens": 4}],
        "/v1/responses": [{"input": last}],
        "/v1/embeddings": [{"input": last}, {"input": ["a", last]}],
        "/v1/score": [{"text_1": "a", "text_2": last}],
        "/v1/rerank": [{"query": last, "documents": ["a"], "truncate_prompt_tokens": 4}],
        "/inference/v1/generate": [
            {"token_ids": [49_100], "sampling_params": {}},
            {"token_ids": [1], "sampling_params": {"stop_token_ids": [49_100]}},
        ],
        "/tokenize": [{"prompt": last}, chat],
    }
    for path, bodies in calls.items():
        for body in bodies:
            answer = await fleet.http.post(path, json={"model": "small", **body})
            assert answer.status_code == 400, (path, body, answer.text)
            assert any(number in answer.text for number in ("49100", "49000")), answer.text
    assert fleet.workers["decode-0"].submissions == []


async def test_a_number_in_a_header_counts_with_all_its_digits(make_fleet):
    fleet = await make_fleet({"decode-0": None}, window_requests=1)
    for raw in ("000000000001" + "9" * 20, "0", "-1", "86400001", "1" * 13):
        response = await fleet.chat(headers={"x-baton-timeout-ms": raw})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "x-baton-timeout-ms"
    assert (await fleet.chat(headers={"x-baton-timeout-ms": "86400000"})).status_code == 200


MANY = 3000
FULL_OF_FAULTS = [
    (CompletionBody, {"prompt": [-1] * MANY}, "prompt[0]"),
    (CompletionBody, {"prompt": [[-1] * MANY]}, "prompt[0][0]"),
    (GenerateBody, {"token_ids": [-1] * MANY, "sampling_params": {}}, "token_ids[0]"),
    (EmbeddingBody, {"input": [-1] * MANY}, "input[0]"),
    (DetokenizeBody, {"tokens": [-1] * MANY}, "tokens[0]"),
    (ChatBody, {"messages": [{}] * MANY}, "messages[0].role"),
    (ChatBody, {"messages": [{"role": "user", "content": [{}] * MANY}]}, "messages[0].content[0]"),
    (ChatBody, {"messages": USER, "guided_choice": [5] * MANY}, "guided_choice[0]"),
]


@pytest.mark.parametrize(("kind", "fields", "param"), FULL_OF_FAULTS)
def test_of_many_faults_the_first_is_looked_at(kind, fields, param):
    """To list a million of them took a minute, in which the router did nothing else."""
    with pytest.raises(InvalidRequestError) as caught:
        parse(kind, json.dumps({"model": MODEL, **fields}).encode())
    assert caught.value.param.startswith(param)
    assert caught.value.__cause__.error_count() < 10


def test_where_faults_have_no_order_their_number_is_said():
    biases = {str(i): "much" for i in range(MANY)}
    body = {"model": MODEL, "messages": USER, "logit_bias": biases}
    with pytest.raises(InvalidRequestError, match=r"the body has 3000 invalid values"):
        parse(ChatBody, json.dumps(body).encode())


async def test_a_penalty_that_fp32_cannot_hold_is_refused_with_its_limits(fleet):
    """Defect 20: it arrived at the worker as zero, and broke the answer's grammar."""
    low = await fleet.chat(repetition_penalty=1e-46)
    assert low.status_code == 400
    assert "0.01" in low.json()["error"]["message"]
    assert "1e-46" in low.json()["error"]["message"]
    for allowed in (0.01, 100):
        assert (await fleet.chat(repetition_penalty=allowed)).status_code == 200


@pytest.mark.parametrize("given", ["\\", "a\\", "a\\\\\\"])
async def test_a_regex_that_ends_in_one_backslash_is_refused(fleet, given):
    """Defect 24: it was accepted."""
    for fields, param in (
        ({"guided_regex": given}, "guided_regex"),
        ({"structured_outputs": {"regex": given}}, "structured_outputs.regex"),
    ):
        error = check_problem(await fleet.chat(**fields), 400, param)
        assert error["code"] == "invalid_grammar"
    assert (await fleet.chat(guided_regex="a\\\\")).status_code == 200


@pytest.mark.parametrize("properties", [None, 5, ["a"]])
async def test_properties_that_are_no_object_are_refused(fleet, properties):
    """With required names they were an error of the router."""
    schema = {"type": "object", "required": ["a"], "properties": properties}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    error = check_problem(await fleet.chat(response_format=asked), 400, "response_format")
    assert error["code"] == "invalid_grammar"
