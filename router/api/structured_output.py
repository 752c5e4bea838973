"""What a body says about the shape of its answer: OpenAI's ``response_format`` and vLLM's names."""

import json
from typing import Any, NamedTuple

from engine.core.errors import InvalidRequestError
from engine.text.grammar import ANY_OBJECT, GrammarKind
from router.api.schema import ChatBody, GenerationBody
from router.api.tools import calls_grammar_of, offered


class Wanted(NamedTuple):
    """A grammar that a client asks for, by the parameter ``param``."""

    param: str
    kind: GrammarKind
    source: str


def wanted_grammar(body: GenerationBody) -> Wanted | None:
    """The one grammar of a body, or None for a free answer.

    Raises:
        InvalidRequestError: There is more than one; names them.
    """
    found = [*_response_format(body), *_guided(body), *_structured_outputs(body)]
    if isinstance(body, ChatBody) and (tools := offered(body.tools, body.tool_choice)):
        found.append(Wanted("tools", "grammar", calls_grammar_of(body, tools)))
    if len(found) > 1:
        names = " and ".join(sorted({wanted.param for wanted in found}))
        raise InvalidRequestError(
            f"{names}: an answer has one structure; give one of them", param=found[0].param
        )
    return found[0] if found else None


def _response_format(body: GenerationBody) -> list[Wanted]:
    given = body.response_format
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [Wanted("response_format", "json", ANY_OBJECT)]
    if given.json_schema is None:
        raise InvalidRequestError(
            "response_format.json_schema: is required for this type",
            param="response_format.json_schema",
        )
    schema = {} if given.json_schema.schema_ is None else given.json_schema.schema_
    return [Wanted("response_format", "json", json.dumps(schema))]


def _guided(body: GenerationBody) -> list[Wanted]:
    return _of(
        "guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar
    )


def _structured_outputs(body: GenerationBody) -> list[Wanted]:
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
) -> list[Wanted]:
    found = []
    if schema is not None:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        found.append(Wanted(f"{prefix}json", "json", text))
    if regex is not None:
        found.append(Wanted(f"{prefix}regex", "regex", regex))
    if choice is not None:
        found.append(Wanted(f"{prefix}choice", "choice", json.dumps(choice)))
    if grammar is not None:
        found.append(Wanted(f"{prefix}grammar", "grammar", grammar))
    return found
