"""``POST /v1/chat/completions``."""

from typing import Annotated, Any, Literal

from pydantic import Field

from router.frontend.api.bodies import parameters
from router.frontend.api.bodies.common import INT32
from router.frontend.api.bodies.generation import GenerationBody
from router.frontend.api.bodies.messages import Messages
from router.frontend.api.bodies.tools import ToolChoice, Tools

_Budget = Annotated[int, Field(ge=0, lt=INT32)]


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: _Budget | None = None
    thinking_budget: _Budget | None = None

    others = parameters.CHAT
