"""``POST /v1/chat/completions``."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from router.api.bodies.common import INT32, Neutral, only
from router.api.bodies.generation import GenerationBody
from router.api.bodies.messages import Messages
from router.api.bodies.tools import ToolChoice, Tools


def _is_label(given: Any) -> bool:
    return given is None or isinstance(given, str)


def _is_metadata(given: Any) -> bool:
    if given is None:
        return True
    return isinstance(given, dict) and all(isinstance(v, str) for v in given.values())


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    neutral: ClassVar[Neutral] = {
        "functions": only(None, []),
        "function_call": only(None, "none"),
        "metadata": _is_metadata,
        "store": only(None, False),
        "modalities": only(None, ["text"]),
        "audio": only(None),
        "prediction": only(None),
        "reasoning_effort": only(None),
        "verbosity": only(None, "medium"),
        "service_tier": only(None, "auto", "default"),
        "web_search_options": only(None),
        "safety_identifier": _is_label,
        "prompt_cache_key": only(None),
        "prompt_cache_retention": only(None),
    }
