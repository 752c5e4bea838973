"""Null is the default of every optional field of every body, and what only an API can say of it."""

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from router.frontend.api.bodies.adapters import LoadAdapterBody, UnloadAdapterBody
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.common import Body, OperatorBody
from router.frontend.api.bodies.completion import CompletionBody
from router.frontend.api.bodies.embedding import EmbeddingBody
from router.frontend.api.bodies.generate import GenerateBody
from router.frontend.api.bodies.parse import checked
from router.frontend.api.bodies.tokens import DetokenizeBody, TokenizeBody
from router.frontend.api.messages.body import CountTokensBody, MessagesBody
from router.frontend.api.pooling.bodies import PoolingBody, RerankBody, ScoreBody
from router.frontend.api.responses.body import InputTokensBody, ResponsesBody
from router.frontend.batch.calls import BatchBody
from router.frontend.operators.keys import routes as key_routes
from router.frontend.operators.models import routes as model_routes
from tests.router.conftest import MODEL
from tests.router.emulated_worker import Script

SCHEMA = {"type": "object"}
TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {
        "role": "assistant",
        "content": "a",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "b", "type": "custom", "custom": {"name": "g", "input": "x"}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "1"},
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "custom", "custom": {"name": "g", "format": {"type": "text"}}},
]
ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}
SHARED = {
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    "structured_outputs": {"regex": "a"},
    "nvext": {"agent_hints": {"osl": 9}},
}
BLOCK = {"type": "text", "text": "hi"}
COUNTED = {
    "messages": [
        {"role": "user", "content": [BLOCK, {"type": "tool_result", "tool_use_id": "a"}]},
    ],
    "system": [BLOCK],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"},
    "cache_control": {"type": "ephemeral"},
    "thinking": {"type": "enabled"},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "context_management": {
        "edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns"}}]
    },
}
ITEMS = {
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    "tools": [
        {"type": "function", "name": "f", "parameters": SCHEMA},
        {"type": "custom", "name": "g", "format": {"type": "text"}},
    ],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    "reasoning": {},
}
EXAMPLES: dict[type[Body], dict[str, Any]] = {
    ChatBody: {
        "messages": TURNS,
        "tools": TOOLS,
        "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED},
        **SHARED,
    },
    CompletionBody: {"prompt": "hi", **SHARED},
    GenerateBody: {
        "token_ids": [1],
        "sampling_params": {"structured_outputs": {"regex": "a"}},
        "stream_options": {"include_usage": True},
    },
    EmbeddingBody: {"input": "hi"},
    PoolingBody: {"input": "hi"},
    ScoreBody: {"text_1": "a", "text_2": "b"},
    RerankBody: {"query": "a", "documents": ["a", {"text": "b"}]},
    TokenizeBody: {"messages": TURNS, "tools": TOOLS},
    DetokenizeBody: {"tokens": [1]},
    LoadAdapterBody: {"lora_name": "a", "lora_path": "b"},
    UnloadAdapterBody: {"lora_name": "a"},
    CountTokensBody: COUNTED,
    MessagesBody: {"max_tokens": 4, **COUNTED, "metadata": {"user_id": "a"}},
    InputTokensBody: ITEMS,
    ResponsesBody: ITEMS,
    BatchBody: {"input_file_id": "a", "endpoint": "/v1/completions"},
}


def kinds_in(annotation: Any) -> list[type[Body]]:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return [annotation]
    return [kind for inner in get_args(annotation) for kind in kinds_in(inner)]


def with_nulls(kinds: list[type[Body]], given: Any, seen: set[type[Body]]) -> Any:
    """The same value with null in each field that is optional and not set."""
    if isinstance(given, list):
        return [with_nulls(kinds, item, seen) for item in given]
    if not isinstance(given, dict) or not kinds:
        return given
    seen.update(kinds)
    found = dict(given)
    for kind in kinds:
        for name, field in kind.model_fields.items():
            alias = field.alias or name
            if alias in given:
                found[alias] = with_nulls(kinds_in(field.annotation), given[alias], seen)
            elif not field.is_required() or alias in found:
                found.setdefault(alias, None)
            for refused in kind.refused:
                found.setdefault(refused, None)
    required = {n for kind in kinds for n, f in kind.model_fields.items() if f.is_required()}
    return {n: value for n, value in found.items() if value is not None or n not in required}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_null_is_the_default_of_every_optional_field(kind: type[Body]) -> None:
    plain = EXAMPLES[kind]
    expected = checked(kind, plain, model=MODEL)
    seen: set[type[Body]] = set()
    assert checked(kind, with_nulls([kind], plain, seen), model=MODEL) == expected
    inner = {kind}
    while (
        more := {
            one
            for outer in inner
            for field in outer.model_fields.values()
            for one in kinds_in(field.annotation)
        }
        - inner
    ):
        inner |= more
    assert {one.__name__ for one in inner - seen} <= {"FunctionOffered", "FunctionNamed"} | {
        *("CalledFunction", "CalledCustom", "InputGrammar", "CustomNamed", "ToolNamed"),
        *("SomeTools", "ContextAmount", "Document", "ResponsesFunctionName", "ImageUrl"),
    }


def test_null_is_the_default_of_operators_bodies_too() -> None:
    assert key_routes and model_routes  # whose modules have the bodies
    kinds = OperatorBody.__subclasses__()
    assert len(kinds) > 3
    for kind in kinds:
        optional = [name for name, field in kind.model_fields.items() if not field.is_required()]
        with pytest.raises(ValidationError) as failed:
            kind.model_validate(dict.fromkeys(kind.model_fields))
        assert not {error["loc"][0] for error in failed.value.errors()} & set(optional)


def test_every_body_of_a_route_has_an_example() -> None:
    def below(kind: type[Body]) -> set[type[Body]]:
        return {kind}.union(*(below(one) for one in kind.__subclasses__()))

    routes = {kind for kind in below(Body) if (kind.__doc__ or "").startswith("Request body")}
    assert routes <= EXAMPLES.keys()


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT = [{"role": "user", "content": "hi"}]
CASES = {
    "a text part without text": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "content": "2+2?"}]}]},
        "messages[0].content[0].text",
    ),
    "a refusal without its text": (
        "/v1/chat/completions",
        {"messages": [*TEXT, {"role": "assistant", "content": [{"type": "refusal"}]}, *TEXT]},
        "messages[1].content[0].refusal",
    ),
    "a text that is null": (
        "/tokenize",
        {"messages": [{"role": "user", "content": ["a", {"type": "text", "text": None}]}]},
        "messages[0].content[1].text",
    ),
    "a refusal of a response without its text": (
        "/v1/responses",
        {"input": [{"role": "assistant", "content": [{"type": "refusal"}]}]},
        "input[0].content[0].refusal",
    ),
    "Anthropic's older name of a format": (
        "/v1/messages",
        {"messages": TEXT, "max_tokens": 4, "output_format": {"type": "json_schema"}},
        "output_format",
    ),
    "llama.cpp's schema of a format": (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_object", "schema": SCHEMA}},
        "response_format.schema",
    ),
    "a chat's format of a response": (
        "/v1/responses",
        {"input": "hi", "text": {"format": {"type": "json_schema", "json_schema": {}}}},
        "text.format.json_schema",
    ),
    "a chat's field in a response": (
        "/v1/responses",
        {"input": "hi", "response_format": {"type": "json_object"}},
        "response_format",
    ),
    "a result of an unknown call": (
        "/v1/messages",
        {
            "max_tokens": 4,
            "messages": [
                *TEXT,
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]},
            ],
        },
        "messages[1].content[0].tool_use_id",
    ),
    "an output of an unknown call": (
        "/v1/responses",
        {"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]},
        "input[0].call_id",
    ),
}


@pytest.fixture
async def fleet(make_fleet):
    return await make_fleet({"decode-0": Script(step_s=0.001)})


async def fault(fleet, path: str, body: dict) -> dict:
    answer = await fleet.http.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


async def test_errors_name_the_field_that_was_sent(fleet) -> None:
    for name, (path, body, place) in CASES.items():
        error = await fault(fleet, path, body)
        assert place in (error.get("param"), error["message"].split(": ")[0]), (name, error)
    body = {"messages": TEXT, "max_tokens": 4, "tool_choice": {"type": "any"}}
    error = await fault(fleet, "/v1/messages", body)
    assert error["message"] == "tool_choice: any needs tools"
    body = {"messages": TEXT, "tool_choice": "required"}
    error = await fault(fleet, "/v1/chat/completions", body)
    assert error["message"] == "tool_choice: required needs tools"


async def test_of_a_union_the_branch_of_the_right_type_speaks(fleet) -> None:
    error = await fault(fleet, "/v1/chat/completions", {**CHAT, "stop": [""] * 99})
    assert error["message"].startswith("stop: must have at most 16 items (got [")
    error = await fault(fleet, "/v1/embeddings", {"input": {"a": 1}})
    assert error["param"] == "input" and " or " in error["message"], "no branch is of this type"


async def test_faults_of_a_query_are_of_the_api(make_fleet, tmp_path) -> None:
    fleet = await make_fleet({}, state_dir=str(tmp_path))
    for path, param in (
        ("/v1/files?limit=0", "limit"),
        ("/v1/files?order=up", "order"),
        ("/v1/batches?limit=x", "limit"),
        ("/fleet/requests?limit=x", "limit"),
    ):
        answer = await fleet.http.get(path, headers={"authorization": "Bearer secret"})
        assert answer.status_code == 400, (path, answer.text)
        error = answer.json()["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert error["message"].startswith(f"{param}: must be")


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
async def test_a_last_message_of_the_assistant_without_text_is_as_if_it_were_absent(
    fleet, content
) -> None:
    body = {"model": MODEL, "messages": TEXT, "max_tokens": 4, "temperature": 0}
    plain = (await fleet.http.post("/v1/messages", json=body)).json()
    body["messages"] = [*TEXT, {"role": "assistant", "content": content}]
    answer = await fleet.http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
    counted = await fleet.http.post("/v1/messages/count_tokens", json=body)
    assert counted.status_code == 200
