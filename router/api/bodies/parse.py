"""From the bytes of a body to the checked object, or to an error that names the field."""

from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from engine.core.errors import InvalidRequestError
from router.api.bodies.common import Body
from router.api.bodies.generation import GenerationBody, StreamOptions
from router.api.bodies.messages import Message

_MAX_FAULTS = 256  # that are looked at, to name one of them

# Parameters of other servers, and the values that do not ask for beams.
_NEUTRAL_BEAMS: dict[str, tuple[object, ...]] = {
    "use_beam_search": (None, False),
    "num_beams": (None, 1),
    "length_penalty": (None, 1.0),
    "early_stopping": (None, False),
}


_Kind = TypeVar("_Kind", bound=Body)


def parse(kind: type[_Kind], raw: bytes) -> _Kind:
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


def _without_neutral(kind: type[Body], data: dict[str, Any], where: str) -> dict[str, Any]:
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
