"""``POST /v1/completions``."""

from typing import Annotated

from pydantic import Field

from router.frontend.api.bodies import parameters
from router.frontend.api.bodies.common import INT32, Prompts, each
from router.frontend.api.bodies.generation import GenerationBody

MAX_PROMPTS = 64


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, lt=INT32)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    others = parameters.COMPLETION

    @property
    def prompt_alternatives(self) -> int | None:
        """How many alternatives each prompt token's logprob needs; None: no prompt logprobs."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in asked if number is not None), default=None)

    def prompts(self) -> list[str | list[int]]:
        """The prompts of the request, each as text or as token ids."""
        return each(self.prompt)
