"""The bodies of requests: every parameter acts, or is refused by name.

Types are never coerced (``"stream": "yes"`` is an error) and ranges never clamped. A parameter of
OpenAI's that Baton does not have is accepted only with the value that means "not used".
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import from_json

from engine.core.errors import InvalidRequestError

_NonEmpty = Annotated[str, StringConstraints(min_length=1)]
_FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
_Stop = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
_TokenId = Annotated[int, Field(ge=0, lt=2**32)]
_INT32 = 2**31
# To list the faults of a million items takes a minute, in which this process does nothing else.
_FIRST_FAULT = Field(fail_fast=True)
_Choices = Annotated[list[_NonEmpty], Field(min_length=1, max_length=4096), _FIRST_FAULT]
_Ids = Annotated[list[_TokenId], _FIRST_FAULT]
_Prompts = str | Annotated[list[str], _FIRST_FAULT] | _Ids | Annotated[list[_Ids], _FIRST_FAULT]
_MAX_FAULTS = 256  # that are looked at, to name one of them

# Parameters of other servers, and the values that do not ask for beams.
_NEUTRAL_BEAMS: dict[str, tuple[object, ...]] = {
    "use_beam_search": (None, False),
    "num_beams": (None, 1),
    "length_penalty": (None, 1.0),
    "early_stopping": (None, False),
}

MAX_PROMPTS = 64
MAX_INPUTS = 2048  # OpenAI's limit for embeddings


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    # Parameters of OpenAI's that Baton does not have, and the values that ask for nothing.
    neutral: ClassVar[dict[str, Callable[[Any], bool]]] = {}


def _only(*values: object) -> Callable[[Any], bool]:
    # `1 == True` in Python, so compare types as well.
    return lambda given: any(type(given) is type(value) and given == value for value in values)


def _is_label(given: Any) -> bool:
    return given is None or isinstance(given, str)


def _is_metadata(given: Any) -> bool:
    if given is None:
        return True
    return isinstance(given, dict) and all(isinstance(v, str) for v in given.values())


class TextPart(_Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(_Strict):
    """The function of a call, and its arguments as JSON text."""

    name: _FunctionName
    arguments: str


class CalledTool(_Strict):
    """A call that the assistant made."""

    id: _NonEmpty
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Strict):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], _FIRST_FAULT] | None = None
    tool_calls: Annotated[list[CalledTool], _FIRST_FAULT] | None = None
    tool_call_id: _NonEmpty | None = None
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None

    neutral = {
        name: _only(None)
        for name in ("refusal", "audio", "function_call", "annotations", "reasoning")
    }

    def text(self) -> str:
        """The content as one string; parts stand on lines of their own."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text for part in self.content)


class FunctionOffered(_Strict):
    """A function that may be called; ``parameters`` is always kept to, ``strict`` or not."""

    name: _FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolOffered(_Strict):
    """A tool that may be called."""

    type: Literal["function"]
    function: FunctionOffered


class FunctionNamed(_Strict):
    """A function, by its name."""

    name: _FunctionName


class ToolNamed(_Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionNamed


_Messages = Annotated[list[Message], Field(min_length=1), _FIRST_FAULT]
_Tools = Annotated[list[ToolOffered], Field(max_length=128)]
ToolChoice = Literal["none", "auto", "required"] | ToolNamed


class StreamOptions(_Strict):
    """How a stream ends."""

    include_usage: bool = False

    neutral = {"include_obfuscation": _only(None, False)}


class JsonSchemaFormat(_Strict):
    """The schema of ``response_format``; it is always kept to, ``strict`` or not."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(_Strict):
    """vLLM's ways to say what an answer must look like."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: _NonEmpty | None = None
    choice: _Choices | None = None
    grammar: _NonEmpty | None = None


class GenerationBody(_Strict):
    """What chat and completions have in common."""

    model: _NonEmpty
    max_tokens: Annotated[int, Field(ge=1, lt=_INT32)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=_INT32)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=4)] | None = None
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=64)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=_INT32)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    priority: Annotated[int, Field(ge=-_INT32, lt=_INT32)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=512)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: _NonEmpty | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _NonEmpty | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(GenerationBody):
    """``POST /v1/chat/completions``."""

    messages: _Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=_INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: _Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    neutral = {
        "functions": _only(None, []),
        "function_call": _only(None, "none"),
        "metadata": _is_metadata,
        "store": _only(None, False),
        "modalities": _only(None, ["text"]),
        "audio": _only(None),
        "prediction": _only(None),
        "reasoning_effort": _only(None),
        "verbosity": _only(None, "medium"),
        "service_tier": _only(None, "auto", "default"),
        "web_search_options": _only(None),
        "safety_identifier": _is_label,
        "prompt_cache_key": _only(None),
        "prompt_cache_retention": _only(None),
    }


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    prompt: _Prompts
    max_tokens: Annotated[int, Field(ge=0, lt=_INT32)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    neutral = {"suffix": _only(None, "")}

    @property
    def prompt_alternatives(self) -> int | None:
        """How many alternatives each prompt token's logprob needs; None: no prompt logprobs."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in asked if number is not None), default=None)

    def prompts(self) -> list[str | list[int]]:
        """The prompts of the request, each as text or as token ids."""
        return _each(self.prompt)


def _each(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    if all(isinstance(item, int) for item in given):
        return [[item for item in given if isinstance(item, int)]]
    return [item for item in given if not isinstance(item, int)]


class EmbeddingBody(_Strict):
    """``POST /v1/embeddings``. ``pooling`` and ``normalize`` are Baton's own."""

    model: _NonEmpty
    input: _Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, lt=_INT32)] | None = None
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    priority: Annotated[int, Field(ge=-_INT32, lt=_INT32)] | None = None

    def inputs(self) -> list[str | list[int]]:
        """The inputs of the request, each as text or as token ids."""
        return _each(self.input)


class TokenizeBody(_Strict):
    """``POST /tokenize``: a prompt, or the messages of a chat."""

    model: _NonEmpty | None = None
    prompt: str | None = None
    messages: _Messages | None = None
    tools: _Tools | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(_Strict):
    """``POST /detokenize``."""

    model: _NonEmpty | None = None
    tokens: _Ids


class LoadAdapterBody(_Strict):
    """``POST /v1/load_lora_adapter``."""

    lora_name: _NonEmpty
    lora_path: _NonEmpty

    neutral = {"load_inplace": _only(None, False)}


class UnloadAdapterBody(_Strict):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: _NonEmpty

    neutral = {"lora_int_id": _only(None)}


_Body = TypeVar("_Body", bound=_Strict)


def parse(kind: type[_Body], raw: bytes) -> _Body:
    """Check a request body.

    Raises:
        InvalidRequestError: Not JSON, not an object, or a parameter is wrong; names it.
    """
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidRequestError("the body must be a JSON object")
    if issubclass(kind, GenerationBody):
        data = _without_beams(data)
    data = _without_neutral(kind, data, "")
    if isinstance(data.get("messages"), list):
        data["messages"] = [
            _without_neutral(Message, item, f"messages[{i}].") if isinstance(item, dict) else item
            for i, item in enumerate(data["messages"])
        ]
    if isinstance(data.get("stream_options"), dict):
        data["stream_options"] = _without_neutral(
            StreamOptions, data["stream_options"], "stream_options."
        )
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _refusal(error, data) from error


def _without_beams(data: dict[str, Any]) -> dict[str, Any]:
    """``data`` without parameters of beam search that ask for nothing.

    Raises:
        InvalidRequestError: One asks for it; the message says what to use in its place.
    """
    answers = 1 if data.get("n") is None else data["n"]
    neutral = _NEUTRAL_BEAMS | {"best_of": (None, answers)}
    for name, harmless in neutral.items():
        if name in data and data[name] not in harmless:
            raise InvalidRequestError(
                f"{name}: beam search, and choosing the best of more answers than are sent, are "
                "not supported by Baton; ask for n answers (n, temperature, seed) and choose among "
                "them by their logprobs",
                param=name,
            )
    return {name: value for name, value in data.items() if name not in neutral}


def _without_neutral(kind: type[_Strict], data: dict[str, Any], where: str) -> dict[str, Any]:
    kept = {}
    for name, value in data.items():
        if name in kind.model_fields:
            kept[name] = value
            continue
        is_neutral = kind.neutral.get(name)
        if is_neutral is None:
            raise InvalidRequestError(f"unknown parameter: {where}{name}", param=f"{where}{name}")
        if not is_neutral(value):
            raise InvalidRequestError(
                f"{where}{name} is not supported by Baton; leave it out", param=f"{where}{name}"
            )
    return kept


def _refusal(error: ValidationError, data: Any) -> InvalidRequestError:
    """The first field at fault. Of a union's branches, those that got furthest are reported."""
    if error.error_count() > _MAX_FAULTS:
        return InvalidRequestError(f"the body has {error.error_count()} faults, too many to list")
    placed = [(_place(item["loc"], data), item) for item in error.errors(include_url=False)]
    first = placed[0][0][:1]
    same = [(place, item) for place, item in placed if place[:1] == first]
    depth = max(len(place) for place, _ in same)
    deepest = [(place, item) for place, item in same if len(place) == depth]
    param = _dotted(deepest[0][0])
    said = dict.fromkeys(_sentence(item) for place, item in deepest if place == deepest[0][0])
    return InvalidRequestError(f"{param}: {' or '.join(said)}", param=param)


def _place(loc: tuple[int | str, ...], data: Any) -> tuple[int | str, ...]:
    """``loc`` without pydantic's own steps, such as the names of union branches."""
    place: tuple[int | str, ...] = ()
    for step in loc:
        if isinstance(data, dict):
            data = data.get(step)
        elif isinstance(data, list) and isinstance(step, int):
            data = data[step] if step < len(data) else None
        elif place:
            continue
        place = (*place, step)
    return place


def _dotted(place: tuple[int | str, ...]) -> str:
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _sentence(item: Any) -> str:
    if item["type"] == "missing":
        return "is required"
    message = str(item["msg"]).replace("Input should", "must").replace("Field required", "missing")
    given = repr(item.get("input"))
    shown = given if len(given) <= 60 else f"{given[:57]}..."
    return f"{message} (got {shown})"
