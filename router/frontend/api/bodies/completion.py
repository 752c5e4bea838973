"""``POST /v1/completions``."""

from typing import Annotated

from pydantic import Field

from router.frontend.api.bodies.common import INT32, Prompts, each
from router.frontend.api.bodies.fields import Fields, Refused
from router.frontend.api.bodies.generation import GenerationBody

MAX_PROMPTS = 64


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: Prompts
    """a text or token ids, or up to 64 of them"""
    max_tokens: Annotated[int, Field(ge=0, lt=INT32)] | None = None
    """chat: what the context leaves; completions: 16"""
    echo: bool | None = None
    """the prompt stands before the answer"""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """0 to 20 alternatives"""

    others = Fields(
        refused={
            "suffix": Refused((None, ""), "write the model's own fill-in-the-middle tokens"),
            "messages": Refused((), "use /v1/chat/completions"),
            "prompt_embeds": Refused((None,), "send text or token ids"),
        },
    )

    @property
    def prompt_alternatives(self) -> int | None:
        """How many alternatives each prompt token's logprob needs; None: no prompt logprobs."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in asked if number is not None), default=None)

    def prompts(self) -> list[str | list[int]]:
        """The prompts of the request, each as text or as token ids."""
        return each(self.prompt)
