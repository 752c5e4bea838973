"""``POST /v1/embeddings``."""

from typing import Annotated, Literal

from pydantic import Field

from router.frontend.api.bodies.common import INT32, Prompts, Truncation, VectorsBody, each
from router.frontend.api.bodies.fields import Fields, Refused

MAX_INPUTS = 2048  # OpenAI's limit for embeddings


class EmbeddingBody(VectorsBody):
    """``POST /v1/embeddings``. ``pooling`` and ``normalize`` are Baton's own."""

    input: Prompts
    """a text or token ids, or up to 2048 of them"""
    encoding_format: Literal["float", "base64"] = "float"
    """float or base64"""
    dimensions: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    """cut the vector to so many"""
    normalize: bool = True
    """to length 1"""
    truncate_prompt_tokens: Truncation | None = None
    """keep the last so many tokens; -1: the whole context"""

    others = Fields(
        refused={
            "messages": Refused((None,), "send input"),
            "embed_dtype": Refused((None, "float32"), "vectors are float32"),
            "add_special_tokens": Refused((None, True), "send token ids"),
        },
    )

    def inputs(self) -> list[str | list[int]]:
        """The inputs of the request, each as text or as token ids."""
        return each(self.input)
