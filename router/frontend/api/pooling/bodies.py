"""Bodies of ``/score``, ``/rerank`` and ``/pooling``, with the names of vLLM, Jina and Cohere."""

from typing import Annotated, ClassVar

from pydantic import Field

from baton.types.errors import InvalidRequestError
from router.frontend.api.bodies.common import FIRST_FAULT, INT32, Body, VectorsBody
from router.frontend.api.bodies.embedding import MAX_INPUTS, EmbeddingBody
from router.frontend.api.bodies.fields import Refused
from router.frontend.api.bodies.opening import opening_text

_Texts = str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS), FIRST_FAULT]
_Limit = Annotated[int, Field(ge=-1, lt=INT32)]


class PooledBody(VectorsBody):
    """Fields that the three bodies share; ``pooling`` is Baton's own."""

    truncate_prompt_tokens: _Limit | None = None
    """number of first tokens to keep of each text; -1: as many as fit into the context"""

    refused: ClassVar[dict[str, Refused]] = {
        name: Refused((None, True), "scores are cosines, without an activation")
        for name in ("activation", "softmax", "use_activation")
    }

    @property
    def most_tokens(self) -> int | None:
        """Number of tokens to which texts are cut; None: they are not cut."""
        return self.truncate_prompt_tokens


class ScoreBody(PooledBody):
    """Request body of ``POST /v1/score``: pairs of texts, or one text with each of several.

    vLLM's newer names of the two sides, ``queries`` and ``documents``, are accepted as well.
    """

    text_1: _Texts | None = None
    """a text, or a list of as many as in text_2"""
    text_2: _Texts | None = None
    """a text, or a list"""
    queries: _Texts | None = None
    """same as text_1"""
    documents: _Texts | None = None
    """same as text_2"""

    def opening(self) -> str:
        """Return the opening of the conversation."""
        return self.user or opening_text(self.text_1)

    def sides(self) -> tuple[list[str], list[str]]:
        """Return the texts of both sides."""
        left = _one_of("text_1", self.text_1, "queries", self.queries)
        right = _one_of("text_2", self.text_2, "documents", self.documents)
        if len(left) not in (1, len(right)):
            raise InvalidRequestError.at(
                "text_1", f"must contain one text, or {len(right)} as text_2 (got {len(left)})"
            )
        if len(left) + len(right) > MAX_INPUTS:
            raise InvalidRequestError.at(
                "text_2",
                f"text_1 and text_2 together must contain at most {MAX_INPUTS} texts (got "
                f"{len(left) + len(right)})",
            )
        return left, right


def _one_of(
    name: str, value: str | list[str] | None, later: str, later_value: str | list[str] | None
) -> list[str]:
    if (value is None) == (later_value is None):
        raise InvalidRequestError.at(name, f"exactly one of {name} and {later} is required")
    given = value if value is not None else later_value
    return [given] if isinstance(given, str) else list(given or ())


class Document(Body):
    """A document in the form of an object."""

    text: str
    """text of the document"""

    refused: ClassVar[dict[str, Refused]] = {
        name: Refused((None,), "send text; images are not supported")
        for name in ("image", "multi_modal", "content")
    }


_Documents = Annotated[
    list[str | Document], Field(min_length=1, max_length=MAX_INPUTS - 1), FIRST_FAULT
]


class RerankBody(PooledBody):
    """Request body of ``POST /v1/rerank``: documents to sort by similarity to a query."""

    query: str
    """text that the documents are compared with"""
    documents: _Documents
    """up to 2047 texts, or objects with a text"""
    top_n: Annotated[int, Field(ge=0, lt=INT32)] | None = None
    """number of documents to return; 0: all"""
    return_documents: bool = True
    """false: the results do not contain the documents' texts"""
    max_tokens_per_doc: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    """number of first tokens to keep of each text"""

    refused: ClassVar[dict[str, Refused]] = {
        "max_chunks_per_doc": Refused((None, 1), "split documents before sending them"),
        "rank_fields": Refused((None, ["text"]), "send documents as texts"),
    }

    @property
    def most_tokens(self) -> int | None:
        """Smaller one of vLLM's limit and Cohere's."""
        own = self.truncate_prompt_tokens
        of_document = self.max_tokens_per_doc
        if own is None or (own < 0 and of_document is not None):
            return of_document
        return own if of_document is None else min(own, of_document)

    def opening(self) -> str:
        """Return the opening of the conversation."""
        return self.user or opening_text(self.query)

    def texts(self) -> list[str]:
        """Return the documents' texts in the order of the request."""
        return [item if isinstance(item, str) else item.text for item in self.documents]


class PoolingBody(PooledBody, EmbeddingBody):
    """Request body of ``POST /pooling``: inputs whose vectors are pooled."""

    refused: ClassVar[dict[str, Refused]] = {
        "task": Refused((None, "embed"), "embed is the only task"),
        **EmbeddingBody.refused,
    }
