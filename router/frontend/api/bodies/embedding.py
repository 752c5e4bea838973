"""Request body of embeddings."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from router.frontend.api.bodies.common import INT32, Prompts, Truncation, VectorsBody, each
from router.frontend.api.bodies.fields import Refused
from router.frontend.api.bodies.opening import opening_text

MAX_INPUTS = 2048  # OpenAI's limit for embeddings


class EmbeddingBody(VectorsBody):
    """Request body of ``POST /v1/embeddings``. ``pooling`` and ``normalize`` are Baton's own."""

    input: Prompts
    """text or token ids, or a list of up to 2048 of these"""
    encoding_format: Literal["float", "base64"] = "float"
    """float or base64"""
    dimensions: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    """number of dimensions to keep"""
    normalize: bool = True
    """true: scale vectors to length 1"""
    truncate_prompt_tokens: Truncation | None = None
    """number of last tokens to keep; -1: as many as fit into the context"""

    refused: ClassVar[dict[str, Refused]] = {
        "messages": Refused((None,), "send input"),
        "embed_dtype": Refused((None, "float32"), "vectors are float32"),
        "add_special_tokens": Refused((None, True), "send token ids"),
    }

    def opening(self) -> str:
        """Return the opening of the conversation."""
        return self.user or opening_text(self.input)

    def inputs(self) -> list[str | list[int]]:
        """Return the inputs, each as text or as token ids."""
        return each(self.input)
