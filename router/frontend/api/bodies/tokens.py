"""``POST /tokenize`` and ``POST /detokenize``."""

from typing import Any

from router.frontend.api.bodies import parameters
from router.frontend.api.bodies.common import Body, Ids, NonEmpty
from router.frontend.api.bodies.messages import Messages
from router.frontend.api.bodies.tools import Tools


class TokenizeBody(Body):
    """``POST /tokenize``: a prompt, or the messages of a chat."""

    model: NonEmpty | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    others = parameters.TOKENIZE


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: NonEmpty | None = None
    tokens: Ids

    others = parameters.DETOKENIZE
