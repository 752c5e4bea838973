"""Request body of chat completions."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from baton.types.errors import InvalidRequestError
from router.frontend.api.bodies.common import FIRST_FAULT, INT32
from router.frontend.api.bodies.fields import MAX_TOOLS, Refused
from router.frontend.api.bodies.generation import GenerationBody
from router.frontend.api.bodies.messages import Messages
from router.frontend.api.bodies.opening import opening_of_turns
from router.frontend.api.bodies.tools import FunctionNamed, FunctionOffered, ToolChoice, Tools

_Budget = Annotated[int, Field(ge=0, lt=INT32)]

_TEXT_ONLY = "this model supports text only"


class ChatBody(GenerationBody):
    """Request body of ``POST /v1/chat/completions``."""

    messages: Messages
    """see below"""
    max_completion_tokens: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    """same as max_tokens"""
    logprobs: bool | None = None
    """true or false"""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """0 to 20; requires `logprobs: true`"""
    tools: Tools | None = None
    """up to 512"""
    tool_choice: ToolChoice | None = None
    """none, auto, required, any (same as required), a function, a custom tool, allowed_tools"""
    functions: Annotated[list[FunctionOffered], Field(max_length=MAX_TOOLS), FIRST_FAULT] | None = (
        None
    )
    """tools of the old API; the answer then has function_call instead of tool_calls"""
    function_call: Literal["none", "auto"] | FunctionNamed | None = None
    """tool_choice of the old API"""
    parallel_tool_calls: bool | None = None
    """false: at most one call"""
    chat_template_kwargs: dict[str, Any] | None = None
    """passed to the chat template"""
    add_generation_prompt: bool | None = None
    """false: the template does not start the answer"""
    continue_final_message: bool | None = None
    """true: the answer continues the last message"""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    """passed to chat templates that support it; none: enable_thinking false"""
    enable_thinking: bool | None = None
    """same as chat_template_kwargs.enable_thinking"""
    include_reasoning: bool | None = None
    """false: the answer does not contain the reasoning"""
    thinking_token_budget: _Budget | None = None
    """number of tokens after which thinking ends"""
    thinking_budget: _Budget | None = None
    """same as thinking_token_budget"""

    accepted: ClassVar[dict[str, str]] = {
        "verbosity": "no chat template supports it",
    }

    @model_validator(mode="before")
    @classmethod
    def _translate_functions(cls, data: Any) -> Any:
        return _translated(data) if isinstance(data, dict) else data

    def opening(self) -> str:
        """Return the opening of the conversation."""
        return self.user or opening_of_turns(self.messages)

    @property
    def custom_tools(self) -> frozenset[str]:
        """Names of the offered custom tools."""
        return frozenset(tool.custom.name for tool in self.tools or () if tool.custom is not None)

    refused: ClassVar[dict[str, Refused]] = {
        "modalities": Refused((None, ["text"]), _TEXT_ONLY),
        "audio": Refused((None,), _TEXT_ONLY),
        "documents": Refused(
            (None, []), "put them into a message or into chat_template_kwargs.documents"
        ),
        "chat_template": Refused(
            (None,), "set chat_template in the fleet file; templates of requests are not run"
        ),
        "echo": Refused((None, False), "prepend the last message to the answer in the client"),
    }


def _translated(data: dict[str, Any]) -> dict[str, Any]:
    """Return a chat's fields with tools instead of OpenAI's old functions, which are kept.

    Results name a function instead of a call.

    Raises:
        InvalidRequestError: The body has both, or a result refers to no earlier call.
    """
    body = dict(data)
    if data.get("functions") and isinstance(data["functions"], list):
        if data.get("tools"):
            raise InvalidRequestError.at("functions", "cannot be combined with tools; use tools")
        body["tools"] = [{"type": "function", "function": f} for f in data["functions"]]
        body["parallel_tool_calls"] = False
        choice = data.get("function_call")
        if isinstance(choice, dict):
            choice = {"type": "function", "function": choice}
        if choice is not None:
            body["tool_choice"] = choice
    messages = data.get("messages")
    if isinstance(messages, list) and any(map(_is_old, messages)):
        body["messages"] = _translated_messages(messages)
    return body


def _is_old(message: Any) -> bool:
    return isinstance(message, dict) and (
        message.get("role") == "function" or message.get("function_call") is not None
    )


def _translated_messages(messages: list[Any]) -> list[Any]:
    ids: dict[str, str] = {}  # id of the last call by the function's name
    translated_messages = []
    for index, message in enumerate(messages):
        if not _is_old(message):
            translated_messages.append(message)
            continue
        fields = dict(message)
        call = fields.pop("function_call", None)
        if fields.get("role") == "function":
            name = fields.pop("name", None)
            if not isinstance(name, str) or name not in ids:
                raise InvalidRequestError.at(
                    f"messages[{index}].name", "must be the function of an earlier function_call"
                )
            fields |= {"role": "tool", "tool_call_id": ids[name]}
        if isinstance(call, dict):
            call_id = f"call_{index}"
            ids[str(call.get("name"))] = call_id
            fields["tool_calls"] = [{"id": call_id, "type": "function", "function": call}]
        translated_messages.append(fields)
    return translated_messages
