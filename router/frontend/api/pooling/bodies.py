"""The bodies of ``/score``, ``/rerank`` and ``/pooling``, with the names of vLLM, Jina and Cohere.

A text may be cut to ``truncate_prompt_tokens``: its first so many tokens stay.
"""

from typing import Annotated, Literal

from pydantic import Field

from baton.types.errors import InvalidRequestError
from router.frontend.api.bodies.common import (
    FIRST_FAULT,
    INT32,
    Body,
    Prompts,
    VectorsBody,
    each,
)
from router.frontend.api.bodies.embedding import MAX_INPUTS
from router.frontend.api.bodies.fields import Fields, Refused

_Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS), FIRST_FAULT]
_Limit = Annotated[int, Field(ge=-1, lt=INT32)]


class PooledBody(VectorsBody):
    """What the three have in common; ``pooling`` is Baton's own."""

    truncate_prompt_tokens: _Limit | None = None
    """keep the first so many tokens of each text; -1: what fits"""

    others = Fields(
        refused={
            name: Refused((None, True), "scores are cosines; there is no head to leave it out of")
            for name in ("activation", "softmax", "use_activation")
        },
    )

    @property
    def most_tokens(self) -> int | None:
        """Texts are cut to so many; None: not cut."""
        return self.truncate_prompt_tokens


class ScoreBody(PooledBody):
    """``POST /v1/score``: pairs of texts, or one text with each of several.

    vLLM's later names for the two sides, ``queries`` and ``documents``, are taken as well.
    """

    text_1: _Texts | None = None
    """one text, or as many as text_2"""
    text_2: _Texts | None = None
    """a text, or several"""
    queries: _Texts | None = None
    """as text_1"""
    documents: _Texts | None = None
    """as text_2"""

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
    """the document"""

    others = Fields(
        refused={
            name: Refused((None,), "send text; images are not read")
            for name in ("image", "multi_modal", "content")
        },
    )


_Documents = Annotated[
    list[str | Document], Field(min_length=1, max_length=MAX_INPUTS - 1), FIRST_FAULT
]


class RerankBody(PooledBody):
    """``POST /v1/rerank``: documents by their nearness to a query."""

    query: str
    """a text"""
    documents: _Documents
    """up to 2047"""
    top_n: Annotated[int, Field(ge=0, lt=INT32)] | None = None
    """only the nearest; 0: all"""
    return_documents: bool = True
    """with their texts, unless false"""
    max_tokens_per_doc: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    """keep the first so many tokens of each text"""

    others = Fields(
        refused={
            "max_chunks_per_doc": Refused((None, 1), "cut documents before they are sent"),
            "rank_fields": Refused((None, ["text"]), "send documents as texts"),
        },
    )

    @property
    def most_tokens(self) -> int | None:
        """Of vLLM's limit and Cohere's, the smaller one."""
        own = self.truncate_prompt_tokens
        of_document = self.max_tokens_per_doc
        if own is None or own < 0:
            return of_document
        return own if of_document is None else min(own, of_document)

    def texts(self) -> list[str]:
        """The documents as they were sent, each as text."""
        return [item if isinstance(item, str) else item.text for item in self.documents]


class PoolingBody(PooledBody):
    """``POST /pooling``: the pooled vector of each input."""

    input: Prompts
    """a text or token ids, or up to 2048 of them"""
    encoding_format: Literal["float", "base64"] = "float"
    """float or base64"""
    dimensions: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    """cut the vector to so many"""
    normalize: bool = True
    """to length 1"""

    others = Fields(
        refused={
            "task": Refused(
                (None, "embed"), "there is one vector for each input, and no other task"
            ),
            "messages": Refused((None,), "send input"),
            "embed_dtype": Refused((None, "float32"), "vectors are float32"),
            "add_special_tokens": Refused((None, True), "send token ids"),
        },
    )

    def inputs(self) -> list[str | list[int]]:
        """The inputs of the request, each as text or as token ids."""
        return each(self.input)
