"""Request body of text completions."""

from typing import Annotated, ClassVar

from pydantic import Field

from router.frontend.api.bodies.common import INT32, Prompts, each
from router.frontend.api.bodies.fields import Refused
from router.frontend.api.bodies.generation import GenerationBody
from router.frontend.api.bodies.opening import opening_text

MAX_PROMPTS = 64


class CompletionBody(GenerationBody):
    """Request body of ``POST /v1/completions``."""

    default_tokens: ClassVar[int] = 16  # most output tokens if the client sets no limit
    id_prefix: ClassVar[str] = "cmpl"

    prompt: Prompts
    """text or token ids, or a list of up to 64 of these"""
    max_tokens: Annotated[int, Field(ge=0, lt=INT32)] | None = None
    """default 16; 0: only the prompt's log-probabilities"""
    echo: bool | None = None
    """true: the text begins with the prompt"""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """0 to 20 alternatives"""

    refused: ClassVar[dict[str, Refused]] = {
        "suffix": Refused((None, ""), "put the model's fill-in-the-middle tokens into the prompt"),
        "messages": Refused((), "use /v1/chat/completions"),
        "prompt_embeds": Refused((None,), "send text or token ids"),
    }

    @property
    def prompt_alternatives(self) -> int | None:
        """Number of alternatives for each prompt token; None: no prompt logprobs."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in asked if number is not None), default=None)

    def opening(self) -> str:
        """Return the opening of the conversation."""
        return self.user or opening_text(self.prompt)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each as text or as token ids."""
        return each(self.prompt)
