"""What a body says about the shape of its answer: OpenAI's ``response_format`` and vLLM's names."""

import json
from typing import Any, NamedTuple

from engine.core.errors import GrammarError, InvalidRequestError
from engine.text.grammar import ANY_OBJECT, GrammarKind
from router.api.bodies.chat import ChatBody
from router.api.bodies.generation import GenerationBody
from router.api.tools import calls_grammar_of, offered


class RequestedGrammar(NamedTuple):
    """A grammar that a client asks for, by the parameter ``param``."""

    param: str
    kind: GrammarKind
    source: str


def requested_grammar(body: GenerationBody) -> RequestedGrammar | None:
    """The one grammar of a body, or None for a free answer.

    Raises:
        InvalidRequestError: There is more than one; names them.
    """
    grammars = [*_response_format(body), *_guided(body), *_structured_outputs(body)]
    if isinstance(body, ChatBody) and (tools := offered(body.tools, body.tool_choice)):
        grammars.append(RequestedGrammar("tools", "grammar", calls_grammar_of(body, tools)))
    if len(grammars) > 1:
        names = " and ".join(sorted({grammar.param for grammar in grammars}))
        raise InvalidRequestError(
            f"{names}: an answer has one structure; give one of them", param=grammars[0].param
        )
    return grammars[0] if grammars else None


def _response_format(body: GenerationBody) -> list[RequestedGrammar]:
    given = body.response_format
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [RequestedGrammar("response_format", "json", ANY_OBJECT)]
    if given.json_schema is None:
        raise InvalidRequestError(
            "response_format.json_schema: is required for this type",
            param="response_format.json_schema",
        )
    schema = {} if given.json_schema.schema_ is None else given.json_schema.schema_
    return [RequestedGrammar("response_format", "json", json.dumps(schema))]


def _guided(body: GenerationBody) -> list[RequestedGrammar]:
    return _of(
        "guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar
    )


def _structured_outputs(body: GenerationBody) -> list[RequestedGrammar]:
    given = body.structured_outputs
    if given is None:
        return []
    return _of("structured_outputs.", given.json_, given.regex, given.choice, given.grammar)


def _of(
    prefix: str,
    schema: dict[str, Any] | bool | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> list[RequestedGrammar]:
    grammars = []
    if schema is not None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        grammars.append(RequestedGrammar(f"{prefix}json", "json", text))
    if regex is not None:
        if (len(regex) - len(regex.rstrip("\\"))) % 2:
            raise GrammarError(
                f"{prefix}regex: ends in a backslash, which escapes nothing; `\\\\` is a backslash",
                param=f"{prefix}regex",
            )
        grammars.append(RequestedGrammar(f"{prefix}regex", "regex", regex))
    if choice is not None:
        grammars.append(RequestedGrammar(f"{prefix}choice", "choice", json.dumps(choice)))
    if grammar is not None:
        grammars.append(RequestedGrammar(f"{prefix}grammar", "grammar", grammar))
    return grammars
