"""``POST /v1/embeddings``."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from router.frontend.api.bodies import parameters
from router.frontend.api.bodies.common import INT32, ModelBody, Prompts, Truncation, each

MAX_INPUTS = 2048  # OpenAI's limit for embeddings


class EmbeddingBody(ModelBody):
    """``POST /v1/embeddings``. ``pooling`` and ``normalize`` are Baton's own."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True
    truncate_prompt_tokens: Truncation | None = None
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    priority: Annotated[int, Field(ge=-INT32, lt=INT32)] | None = None

    others = parameters.EMBEDDING

    def inputs(self) -> list[str | list[int]]:
        """The inputs of the request, each as text or as token ids."""
        return each(self.input)
