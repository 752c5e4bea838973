"""Writes ``docs/parameters.md``: ``python -m tests.router.api.parameters_page``."""

from pathlib import Path

from router.frontend.api.bodies.adapters import LoadAdapterBody, UnloadAdapterBody
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.common import Body
from router.frontend.api.bodies.completion import CompletionBody
from router.frontend.api.bodies.embedding import EmbeddingBody
from router.frontend.api.bodies.generation import (
    JsonSchemaFormat,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
)
from router.frontend.api.bodies.messages import CalledFunction, CalledTool, Message, Part
from router.frontend.api.bodies.tokens import DetokenizeBody, TokenizeBody
from router.frontend.api.bodies.tools import FunctionOffered, ToolOffered
from router.frontend.api.messages import body as messages
from router.frontend.api.pooling import bodies as pooling
from router.frontend.api.responses import body as responses
from router.frontend.batch.calls import BatchBody

KINDS: dict[type[Body], str] = {
    ChatBody: "`POST /v1/chat/completions`",
    CompletionBody: "`POST /v1/completions`",
    StreamOptions: "`stream_options`",
    Message: "a message",
    Part: "a part of a message's content",
    CalledTool: "a replayed call, `tool_calls[]`",
    CalledFunction: "the function of a replayed call",
    ToolOffered: "a tool, `tools[]`",
    FunctionOffered: "a function that is offered",
    ResponseFormat: "`response_format`",
    JsonSchemaFormat: "`response_format.json_schema`",
    StructuredOutputs: "`structured_outputs`",
    EmbeddingBody: "`POST /v1/embeddings`",
    TokenizeBody: "`POST /tokenize`",
    DetokenizeBody: "`POST /detokenize`",
    LoadAdapterBody: "`POST /v1/load_lora_adapter`",
    UnloadAdapterBody: "`POST /v1/unload_lora_adapter`",
    responses.ResponsesBody: "`POST /v1/responses`",
    responses.InputTokensBody: "`POST /v1/responses/input_tokens`",
    responses.ResponsesItem: "an item of `input`",
    responses.ResponsesPart: "a part of an item's content",
    responses.ResponsesFunction: "a tool of `/v1/responses`",
    responses.ResponsesToolChoice: "`tool_choice` of `/v1/responses`, where it is an object",
    responses.ResponsesFunctionName: "a tool of `allowed_tools`",
    responses.ResponsesText: "`text`",
    responses.ResponsesTextFormat: "`text.format`",
    responses.ResponsesReasoning: "`reasoning`",
    messages.MessagesBody: "`POST /v1/messages`",
    messages.CountTokensBody: "`POST /v1/messages/count_tokens`",
    messages.MessagesTurn: "a message of `/v1/messages`",
    messages.MessagesBlock: "a content block",
    messages.MessagesTool: "a tool of `/v1/messages`",
    messages.MessagesToolChoice: "`tool_choice` of `/v1/messages`",
    messages.MessagesMetadata: "`metadata` of `/v1/messages`",
    messages.MessagesOutputConfig: "`output_config`",
    messages.MessagesOutputFormat: "`output_config.format`",
    messages.MessagesThinking: "`thinking`",
    pooling.ScoreBody: "`POST /v1/score`, `/score`",
    pooling.RerankBody: "`POST /v1/rerank`, `/v2/rerank`, `/rerank`",
    pooling.Document: "`documents[]` of a ranking",
    pooling.PoolingBody: "`POST /pooling`",
    BatchBody: "`POST /v1/batches`",
}

PAGE = Path(__file__).parents[3] / "docs" / "parameters.md"

HEAD = """\
# What becomes of each parameter

Written by `python -m tests.router.api.parameters_page` from the classes of bodies that the router
acts by (`router/frontend/api/bodies/`, and `body.py` of the newer APIs); a test compares them.

- **honoured**: it acts. A value outside its limits is a 400 that names it.
- **accepted**: taken and left aside, because here it changes nothing.
- **refused**: ignoring it would change the answer. A 400 says what to do instead; values that
  ask for nothing are taken.
- **any other field** is left aside. The header `x-baton-ignored: a, messages[].b` of the answer
  names it, whether that is whole, streamed or an error, and `baton_ignored_fields{where}` counts
  it. With `clients: {strict: true}` in the fleet's file it is a 400 instead.

Values are read as vLLM reads them: `"0.5"` is 0.5, `5.0` is 5 where a whole number is wanted,
`null` is the default. A `model` that is left out is the one that the fleet serves.

`X-Request-Id` (up to 128 of `A-Za-z0-9._:/+=@~-`) comes back in the answer, stands in the log as
`client_request_id` and in traces as `baton.client_request_id`, and `GET /fleet/requests/{id}` finds
the request by it. Any other value is left aside, and the answer carries our own id.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(_section(*row) for row in KINDS.items())])


def _section(kind: type[Body], title: str) -> str:
    rows = [("field", "", "")]
    for name, field in kind.model_fields.items():
        if field.description is not None:
            rows.append((f"`{field.alias or name}`", "honoured", field.description))
    rows += [(f"`{name}`", "accepted", note) for name, note in kind.others.accepted.items()]
    rows += [(f"`{name}`", "refused", rule.instead) for name, rule in kind.others.refused.items()]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---|---|---|")
    return "\n".join([f"## {title[0].upper()}{title[1:]}", "", *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
