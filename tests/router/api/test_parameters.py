"""The table of fields is complete, and the docs say what it says."""

import pytest

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
from router.frontend.api.bodies.parameters import TABLE
from router.frontend.api.bodies.tokens import DetokenizeBody, TokenizeBody
from router.frontend.api.bodies.tools import FunctionOffered, ToolOffered
from router.frontend.api.messages import body as messages
from router.frontend.api.messages.parameters import TABLE as MESSAGES_TABLE
from router.frontend.api.pooling import bodies as pooling
from router.frontend.api.pooling.parameters import TABLE as POOLING_TABLE
from router.frontend.api.responses import body as responses
from router.frontend.api.responses.parameters import TABLE as RESPONSES_TABLE
from router.frontend.batch.calls import BatchBody
from router.frontend.batch.parameters import TABLE as BATCH_TABLE
from tests.router.api.parameters_page import PAGE, page

KINDS = (
    *(ChatBody, CompletionBody, StreamOptions, Message, Part, CalledTool, CalledFunction),
    *(ToolOffered, FunctionOffered, ResponseFormat, JsonSchemaFormat, StructuredOutputs),
    *(EmbeddingBody, TokenizeBody, DetokenizeBody, LoadAdapterBody, UnloadAdapterBody),
    *(
        responses.ResponsesBody,
        responses.InputTokensBody,
        responses.ResponsesItem,
        responses.ResponsesPart,
    ),
    *(responses.ResponsesFunction, responses.ResponsesToolChoice, responses.ResponsesFunctionName),
    *(responses.ResponsesText, responses.ResponsesTextFormat, responses.ResponsesReasoning),
    *(
        messages.MessagesBody,
        messages.CountTokensBody,
        messages.MessagesTurn,
        messages.MessagesBlock,
    ),
    *(messages.MessagesTool, messages.MessagesToolChoice, messages.MessagesMetadata),
    *(messages.MessagesOutputConfig, messages.MessagesOutputFormat, messages.MessagesThinking),
    *(pooling.ScoreBody, pooling.RerankBody, pooling.Document, pooling.PoolingBody, BatchBody),
)


def test_no_two_bodies_have_the_same_name():
    """Their schemas stand in one list in ``/openapi.json``."""

    def below(kind: type[Body]) -> list[type[Body]]:
        return [*kind.__subclasses__(), *(b for k in kind.__subclasses__() for b in below(k))]

    names = [kind.__name__ for kind in set(below(Body))]
    assert len(names) > 30
    assert sorted(set(names)) == sorted(names)


def test_every_table_has_its_class():
    assert [kind.others for kind in KINDS] == [
        *(*TABLE, *RESPONSES_TABLE, *MESSAGES_TABLE, *POOLING_TABLE, *BATCH_TABLE)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_each_field_has_one_row(kind: type[Body]):
    """What is a field of a class acts, so it is honoured or no part of what is sent."""
    table = kind.others
    fields = {field.alias or name for name, field in kind.model_fields.items()}
    inert = fields & table.accepted.keys()  # read, and said to change nothing
    assert fields - inert == set(table.honoured)
    assert inert <= {"name", "description"}
    assert not table.accepted.keys() & table.refused.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_says_what_to_do_and_lets_defaults_through(kind: type[Body]):
    for name, rule in kind.others.refused.items():
        assert rule.instead, name
        assert not rule.allows(object())


def test_the_page_says_what_the_table_says():
    assert PAGE.read_text(encoding="utf-8") == page()
