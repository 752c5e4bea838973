"""``POST /v1/chat/completions``."""

from typing import Annotated, Any, Literal

from pydantic import Field

from router.frontend.api.bodies.common import INT32
from router.frontend.api.bodies.fields import Fields, Refused
from router.frontend.api.bodies.generation import GenerationBody
from router.frontend.api.bodies.messages import Messages
from router.frontend.api.bodies.tools import ToolChoice, Tools

_Budget = Annotated[int, Field(ge=0, lt=INT32)]

_TEXT_ONLY = "this model reads and writes text only"


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: Messages
    """see below"""
    max_completion_tokens: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    """as max_tokens"""
    logprobs: bool | None = None
    """true or false"""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """0 to 20, with logprobs"""
    tools: Tools | None = None
    """up to 512"""
    tool_choice: ToolChoice | None = None
    """none, auto, required, a function, allowed_tools"""
    parallel_tool_calls: bool | None = None
    """false: one call at most"""
    chat_template_kwargs: dict[str, Any] | None = None
    """given to the chat template"""
    add_generation_prompt: bool | None = None
    """false: the template does not begin the answer"""
    continue_final_message: bool | None = None
    """the answer goes on with the last message"""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    """given to a template that knows it; none: enable_thinking false"""
    enable_thinking: bool | None = None
    """as in chat_template_kwargs"""
    include_reasoning: bool | None = None
    """false leaves the reasoning out of the answer"""
    thinking_token_budget: _Budget | None = None
    """tokens after which thinking is closed"""
    thinking_budget: _Budget | None = None
    """as thinking_token_budget"""

    others = Fields(
        accepted={
            "verbosity": "no template knows it",
        },
        refused={
            "functions": Refused((None, []), "use tools"),
            "function_call": Refused((None, "none"), "use tool_choice"),
            "modalities": Refused((None, ["text"]), _TEXT_ONLY),
            "audio": Refused((None,), _TEXT_ONLY),
            "web_search_options": Refused((None,), "offer a function for it in tools"),
            "documents": Refused(
                (None, []), "write them into a message, or give chat_template_kwargs.documents"
            ),
            "chat_template": Refused(
                (None,), "templates run in the router: set chat_template in the fleet's file"
            ),
            "echo": Refused((None, False), "put the last message before the answer yourself"),
        },
    )
