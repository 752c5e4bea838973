"""``POST /tokenize`` and ``POST /detokenize``."""

from typing import Any

from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.common import Body, Ids, NonEmpty
from router.frontend.api.bodies.fields import Fields
from router.frontend.api.bodies.messages import Messages
from router.frontend.api.bodies.tools import Tools


class TokenizeBody(Body):
    """``POST /tokenize``: a prompt, or the messages of a chat."""

    model: NonEmpty | None = None
    """left out: the model that the fleet serves"""
    prompt: str | None = None
    """a text"""
    messages: Messages | None = None
    """as in a chat"""
    tools: Tools | None = None
    """as in a chat"""
    add_special_tokens: bool = True
    """for a prompt: true"""
    add_generation_prompt: bool | None = None
    """as in a chat"""
    continue_final_message: bool = False
    """as in a chat"""
    chat_template_kwargs: dict[str, Any] | None = None
    """as in a chat"""
    return_token_strs: bool = False
    """each token as text, too"""

    others = Fields(
        accepted={"mm_processor_kwargs": "of images, which are refused where they stand"},
        refused={"chat_template": ChatBody.others.refused["chat_template"]},
    )


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: NonEmpty | None = None
    """left out: the model that the fleet serves"""
    tokens: Ids
    """token ids"""
