"""Grammars requested by a body: OpenAI's ``response_format``, vLLM's names, tools, thinking."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from baton.text.calls.grammar import Choice
from baton.text.grammar import ANY_OBJECT, Framed, GrammarKind
from baton.text.json_schema import checked_afterwards, lenient, without_annotations
from baton.text.tools import Tool, ToolSyntax
from baton.types.errors import GrammarError, InvalidRequestError
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.decimals import refuse_long_decimals
from router.frontend.api.bodies.generation import GenerationBody
from router.frontend.api.bodies.rendering import rendering_of
from router.frontend.api.tool_use.grammar import CallsGrammar, Levels, calls_grammar_of
from router.frontend.api.tool_use.offered import may_be_called, may_call_several, must_call, offered
from router.served_model import ServedModel

_ANY_TEXT = "start: /(.|\\n)*/"


class RequestedGrammar(NamedTuple):
    """A grammar that a client requests by the parameter ``param``.

    Attributes:
        lenient: Tools in it that are not strict, so that their schemas may be relaxed.
        ignored: Parts of these tools that it does not enforce.
        checked: Schemas that complete arguments are checked against, by name of the tool.
    """

    param: str
    kind: GrammarKind
    source: str
    lenient: Sequence[Tool] = ()
    ignored: Sequence[str] = ()
    checked: Mapping[str, str] = MappingProxyType({})


_REQUESTS = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "response_format"),
    *("structured_outputs", "tools", "thinking_token_budget", "thinking_budget"),
)
"""Fields without which an answer has no grammar."""


def grammar_bytes(body: GenerationBody, size_bytes: int) -> int:
    """Return the size of a body for `requested_grammar`: 0 if it requests none."""
    requests = any(getattr(body, name, None) is not None for name in _REQUESTS)
    return size_bytes if requests else 0


def requested_grammar(
    body: GenerationBody, model: ServedModel, levels: Levels | None = None
) -> RequestedGrammar | None:
    """Return the grammar of a body, or None if the answer is unconstrained.

    ``levels`` are those of tools whose schemas are relaxed.
    """
    given = (body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    shapes = [*_response_format(body), *_of("guided_", *given), *_structured_outputs(body)]
    if len(shapes) > 1:
        names = " and ".join(sorted({shape.param for shape in shapes}))
        raise InvalidRequestError(
            f"{names}: cannot be combined; use one of them", param=shapes[0].param
        )
    shape = shapes[0] if shapes else None
    if not isinstance(body, ChatBody):
        return shape
    tools = may_be_called(offered(body.tools, body.tool_choice), body.tool_choice)
    shaped = shape is not None
    calls = _calls(body, tools, model.tool_syntax, shaped=shaped, levels=levels)
    instead = ""
    if calls is not None and (shape is None or must_call(body.tool_choice)):
        shape = RequestedGrammar("tools", "grammar", calls.source)
    elif calls is not None:
        instead = calls.source
    before = _thought(body, model, shaped=shape is not None)
    if shape is None and before:
        shape = RequestedGrammar("thinking_token_budget", "grammar", _ANY_TEXT)
    if shape is not None and (before or instead):
        framed = Framed(shape.kind, shape.source, before, instead)
        shape = RequestedGrammar(shape.param, "framed", framed.encoded())
    if shape is None or calls is None:
        return shape
    lenient_tools = [tool for tool in tools if tool.lenient]
    return shape._replace(lenient=lenient_tools, ignored=calls.ignored, checked=calls.checked)


def _calls(
    body: ChatBody,
    tools: Sequence[Tool],
    syntax: ToolSyntax,
    *,
    shaped: bool,
    levels: Levels | None,
) -> CallsGrammar | None:
    """Return the grammar of calls, without other text if that has a grammar of its own."""
    if not tools:
        return None
    choice: Choice = "required" if shaped or must_call(body.tool_choice) else "auto"
    return calls_grammar_of(tools, choice, syntax, parallel=may_call_several(body), levels=levels)


def _thought(body: ChatBody, model: ServedModel, *, shaped: bool) -> str:
    """Return the grammar of the thinking if it has a budget or a constrained answer follows."""
    budget = body.thinking_token_budget
    if budget is None:
        budget = body.thinking_budget
    if not (shaped or budget is not None):
        return ""
    return model.thought_grammar(rendering_of(body, model.template), budget)


def _response_format(body: GenerationBody) -> list[RequestedGrammar]:
    given = body.response_format
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [RequestedGrammar("response_format", "json", ANY_OBJECT)]
    if given.json_schema is None:
        raise InvalidRequestError.at("response_format.json_schema", "is required for this type")
    schema = {} if given.json_schema.schema_ is None else given.json_schema.schema_
    if given.json_schema.strict is False and isinstance(schema, dict):
        schema = lenient(schema)
    return [RequestedGrammar("response_format", "json", _source(schema))]


def _source(schema: dict[str, Any] | bool) -> str:
    return json.dumps(without_annotations(schema))


def checked_schema(body: GenerationBody) -> str:
    """Return the schema that the complete answer is checked against; empty if none is needed."""
    given = body.response_format
    if given is None or given.type != "json_schema" or given.json_schema is None:
        return ""
    schema = given.json_schema.schema_
    if given.json_schema.strict is not False or not isinstance(schema, dict):
        return ""
    return json.dumps(schema) if checked_afterwards(schema) else ""


def _structured_outputs(body: GenerationBody) -> list[RequestedGrammar]:
    given = body.structured_outputs
    if given is None:
        return []
    grammars = _of("structured_outputs.", given.json_, given.regex, given.choice, given.grammar)
    if given.json_object:
        grammars.append(RequestedGrammar("structured_outputs.json_object", "json", ANY_OBJECT))
    return grammars


def _of(
    prefix: str,
    schema: dict[str, Any] | bool | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> list[RequestedGrammar]:
    grammars = []
    if schema is not None:
        text = schema if isinstance(schema, str) else _source(schema)
        if isinstance(schema, str):
            refuse_long_decimals(f'{{"{prefix}json": {schema}}}'.encode(errors="replace"))
        grammars.append(RequestedGrammar(f"{prefix}json", "json", text))
    if regex is not None:
        if (len(regex) - len(regex.rstrip("\\"))) % 2:
            raise GrammarError.at(
                f"{prefix}regex", "ends with a single backslash; write `\\\\` for a backslash"
            )
        grammars.append(RequestedGrammar(f"{prefix}regex", "regex", regex))
    if choice is not None:
        grammars.append(RequestedGrammar(f"{prefix}choice", "choice", json.dumps(choice)))
    if grammar is not None:
        grammars.append(RequestedGrammar(f"{prefix}grammar", "grammar", grammar))
    return grammars
