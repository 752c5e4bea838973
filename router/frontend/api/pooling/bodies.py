"""The bodies of ``/score``, ``/rerank`` and ``/pooling``, with the names of vLLM, Jina and Cohere.

A text may be cut to ``truncate_prompt_tokens``: its first so many tokens stay.
"""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from baton.types.errors import InvalidRequestError
from router.frontend.api.bodies.common import (
    FIRST_FAULT,
    INT32,
    Body,
    ModelBody,
    Prompts,
    each,
)
from router.frontend.api.bodies.embedding import MAX_INPUTS
from router.frontend.api.pooling import parameters

_Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS), FIRST_FAULT]
_Limit = Annotated[int, Field(ge=-1, lt=INT32)]


class PooledBody(ModelBody):
    """What the three have in common; ``pooling`` is Baton's own."""

    pooling: Literal["mean", "last"] = "mean"
    truncate_prompt_tokens: _Limit | None = None
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    priority: Annotated[int, Field(ge=-INT32, lt=INT32)] | None = None

    @property
    def most_tokens(self) -> int | None:
        """Texts are cut to so many; None: not cut."""
        return self.truncate_prompt_tokens


class ScoreBody(PooledBody):
    """``POST /v1/score``: pairs of texts, or one text with each of several.

    vLLM's later names for the two sides, ``queries`` and ``documents``, are taken as well.
    """

    text_1: _Texts | None = None
    text_2: _Texts | None = None
    queries: _Texts | None = None
    documents: _Texts | None = None

    others = parameters.SCORE

    def sides(self) -> tuple[list[str], list[str]]:
        """The texts on the left and on the right.

        Raises:
            InvalidRequestError: A side is missing or doubled, or they do not fit together.
        """
        left = _one_of("text_1", self.text_1, "queries", self.queries)
        right = _one_of("text_2", self.text_2, "documents", self.documents)
        if len(left) not in (1, len(right)):
            raise InvalidRequestError(
                f"text_1: must be one text, or as many as text_2, {len(right)} (got {len(left)})",
                param="text_1",
            )
        if len(left) + len(right) > MAX_INPUTS:
            raise InvalidRequestError(
                f"text_2: both sides together hold at most {MAX_INPUTS} texts (got "
                f"{len(left) + len(right)})",
                param="text_2",
            )
        return left, right


def _one_of(
    name: str, value: str | list[str] | None, later: str, later_value: str | list[str] | None
) -> list[str]:
    if (value is None) == (later_value is None):
        raise InvalidRequestError(f"{name}: give it, or {later}; one of the two", param=name)
    given = value if value is not None else later_value
    return [given] if isinstance(given, str) else list(given or ())


class Document(Body):
    """A document as an object."""

    text: str

    others = parameters.DOCUMENT


_Documents = Annotated[
    list[str | Document], Field(min_length=1, max_length=MAX_INPUTS - 1), FIRST_FAULT
]


class RerankBody(PooledBody):
    """``POST /v1/rerank``: documents by their nearness to a query."""

    query: str
    documents: _Documents
    top_n: Annotated[int, Field(ge=0, lt=INT32)] | None = None
    return_documents: bool = True
    max_tokens_per_doc: Annotated[int, Field(ge=1, lt=INT32)] | None = None

    others = parameters.RERANK

    @property
    def most_tokens(self) -> int | None:
        """Of vLLM's limit and Cohere's, the smaller one."""
        own, of_document = self.truncate_prompt_tokens, self.max_tokens_per_doc
        if own is None or own < 0:
            return of_document
        return own if of_document is None else min(own, of_document)

    def texts(self) -> list[str]:
        """The documents as they were sent, each as text."""
        return [item if isinstance(item, str) else item.text for item in self.documents]


class PoolingBody(PooledBody):
    """``POST /pooling``: the pooled vector of each input."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    normalize: bool = True

    others = parameters.POOLING

    def inputs(self) -> list[str | list[int]]:
        """The inputs of the request, each as text or as token ids."""
        return each(self.input)
