"""Head of a response object, which repeats the request, and the stored input items."""

from collections.abc import Sequence
from time import time
from typing import Any

from router.frontend.api.formats.numbers import encodable
from router.frontend.api.responses.body import (
    ResponsesBody,
    ResponsesItem,
    ResponsesPart,
    ResponsesTool,
)
from router.frontend.api.responses.format import item_id
from router.request import GenerationRequest

_PREFIXES = {
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_OFFERED = ("function", "custom", "namespace")


def head_of(body: ResponsesBody, answer_id: str, request: GenerationRequest) -> dict[str, Any]:
    """Return the response object without status, output and usage."""
    text = body.text.model_dump(exclude_none=True, by_alias=True) if body.text is not None else {}
    reasoning = body.reasoning.model_dump() if body.reasoning is not None else {}
    choice = body.tool_choice
    return {
        "id": answer_id,
        "object": "response",
        "created_at": int(time()),
        "model": body.model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None, **reasoning},
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier if request.hints.turn else "default",
        "store": body.keeps,
        "temperature": request.sampling.temperature,
        "text": encodable({"format": {"type": "text"}, **text}),
        "tool_choice": choice
        if isinstance(choice, str)
        else choice.model_dump(exclude_none=True)
        if choice is not None
        else "auto",
        "tools": [encodable(_tool(tool)) for tool in body.tools or () if tool.type in _OFFERED],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": request.sampling.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _tool(tool: ResponsesTool) -> dict[str, Any]:
    if tool.type == "function":  # the fields of OpenAI's that may be null
        return tool.model_dump(exclude={"format", "tools"})
    return tool.model_dump(exclude_none=True)


def kept_input(response_id: str, given: Sequence[ResponsesItem]) -> list[dict[str, Any]]:
    """Return the items in stored form; the id of each refers to its response."""
    kept = []
    for index, item in enumerate(given):
        prefix = _PREFIXES.get(item.type, "msg")
        fields = {"id": item_id(response_id, prefix, "in", index), "status": "completed"}
        if item.type == "message" and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            item = item.model_copy(
                update={"content": [ResponsesPart(type=kind, text=item.content)]}
            )
        more: dict[str, Any] = {"summary": []} if item.type == "reasoning" else {}
        shown = {**more, **item.model_dump(exclude_none=True), **fields}
        if isinstance(item.content, list):
            shown["content"] = [_kept_part(part) for part in shown["content"]]
        kept.append(shown)
    return kept


def _kept_part(part: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a message; text of an assistant has two more fields."""
    if part["type"] != "output_text":
        return part
    return {**part, "annotations": [], "logprobs": []}
