"""Request bodies of tokenization."""

from typing import Any, ClassVar

from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.common import Body, Ids, NonEmpty
from router.frontend.api.bodies.fields import Refused
from router.frontend.api.bodies.messages import Messages
from router.frontend.api.bodies.tools import Tools


class TokenizeBody(Body):
    """Request body of ``POST /tokenize``: a prompt, or the messages of a chat."""

    model: NonEmpty | None = None
    """default: the model that the fleet serves"""
    prompt: str | None = None
    """text to tokenize"""
    messages: Messages | None = None
    """same as in a chat"""
    tools: Tools | None = None
    """same as in a chat"""
    add_special_tokens: bool = True
    """whether the tokenizer adds its special tokens to a prompt"""
    add_generation_prompt: bool | None = None
    """same as in a chat"""
    continue_final_message: bool = False
    """same as in a chat"""
    chat_template_kwargs: dict[str, Any] | None = None
    """same as in a chat"""
    return_token_strs: bool = False
    """true: also return the text of each token"""

    accepted: ClassVar[dict[str, str]] = {
        "mm_processor_kwargs": "applies only to images, which are rejected"
    }
    refused: ClassVar[dict[str, Refused]] = {"chat_template": ChatBody.refused["chat_template"]}


class DetokenizeBody(Body):
    """Request body of ``POST /detokenize``."""

    model: NonEmpty | None = None
    """default: the model that the fleet serves"""
    tokens: Ids
    """token ids"""
