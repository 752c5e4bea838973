"""From the bytes of a body to the checked object, or to an error that names the field."""

from functools import cache
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic_core import from_json

from baton.types.errors import InvalidRequestError
from router.frontend.api.bodies.common import Body
from router.frontend.api.bodies.fields import Ignored, refuse

_MAX_FAULTS = 256  # that are looked at, to name one of them
_OBJECTS = ("dict_type", "model_type", "model_attributes_type", "dataclass_type")

_Kind = TypeVar("_Kind", bound=Body)
_Kinds = tuple[type[Body], ...]


def parse(
    kind: type[_Kind], raw: bytes, ignored: Ignored | None = None, *, model: str = ""
) -> _Kind:
    """Check a request body.

    Args:
        kind: What it is to be.
        raw: JSON text.
        ignored: Is told of the fields that nobody knows.
        model: Stands for a ``model`` that the body leaves out.

    Raises:
        InvalidRequestError: Not JSON, not an object, or a parameter is wrong; names it.
    """
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return checked(kind, data, ignored, model=model)


def checked(
    kind: type[_Kind], data: dict[str, Any], ignored: Ignored | None = None, *, model: str = ""
) -> _Kind:
    """As `parse`, of a body that is no text any more."""
    data = _Sieve(Ignored() if ignored is None else ignored).known((kind,), data, "", "")
    if model and data.get("model") is None:
        data["model"] = model
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _refusal(error, data) from error


class _Sieve:
    """Takes out of a body what is no field of its class."""

    def __init__(self, ignored: Ignored) -> None:
        self._ignored = ignored

    def known(self, kinds: _Kinds, data: dict[str, Any], place: str, where: str) -> dict[str, Any]:
        """The fields that the classes have.

        Args:
            kinds: What the object may be.
            data: The object.
            place: Where such objects stand, with ``[]`` for an index and a dot at the end.
            where: Where this one stands.
        """
        known = _fields(kinds)
        kept = {}
        for name, value in data.items():
            inner = known.get(name)
            if inner is None:
                self._other(kinds, data, name, place, where)
            elif inner and isinstance(value, dict | list):
                kept[name] = self._inside(inner, value, f"{place}{name}", f"{where}{name}")
            else:
                kept[name] = value
        return kept

    def _inside(self, kinds: _Kinds, value: Any, place: str, where: str) -> Any:
        if isinstance(value, dict):
            return self.known(kinds, value, f"{place}.", f"{where}.")
        if not isinstance(value, list):
            return value
        return [
            self.known(kinds, item, f"{place}[].", f"{where}[{index}].")
            if isinstance(item, dict)
            else item
            for index, item in enumerate(value)
        ]

    def _other(
        self, kinds: _Kinds, data: dict[str, Any], name: str, place: str, where: str
    ) -> None:
        value = data[name]
        for kind in kinds:
            if name in kind.others.accepted:
                return
            rule = kind.others.refused.get(name)
            if rule is None:
                continue
            if name == "best_of" and value == data.get("n"):
                return
            refuse(name, where, rule, value)
            return
        self._ignored.add(f"{place}{name}", f"{where}{name}")


@cache
def _fields(kinds: _Kinds) -> dict[str, _Kinds]:
    """Field to the classes of the objects that it may hold."""
    found: dict[str, _Kinds] = {}
    for kind in kinds:
        for name, field in kind.model_fields.items():
            alias = field.alias or name
            found[alias] = (*found.get(alias, ()), *_bodies_in(field.annotation))
    return found


def _bodies_in(annotation: Any) -> _Kinds:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return (annotation,)
    return tuple(kind for inner in get_args(annotation) for kind in _bodies_in(inner))


def _refusal(error: ValidationError, data: Any) -> InvalidRequestError:
    """The first field at fault. Of a union's branches, those that got furthest are reported."""
    if error.error_count() > _MAX_FAULTS:
        return InvalidRequestError(f"the body has {error.error_count()} faults, too many to list")
    placed = [(_place(item, data), item) for item in error.errors(include_url=False)]
    first = placed[0][0][:1]
    same = [(place, item) for place, item in placed if place[:1] == first]
    depth = max(len(place) for place, _ in same)
    deepest = [(place, item) for place, item in same if len(place) == depth]
    param = _dotted(deepest[0][0])
    said = dict.fromkeys(_sentence(item) for place, item in deepest if place == deepest[0][0])
    return InvalidRequestError(f"{param}: {' or '.join(said)}", param=param)


def _place(item: Any, data: Any) -> tuple[int | str, ...]:
    """Where the fault is, without pydantic's own steps, such as the names of union branches."""
    place: tuple[int | str, ...] = ()
    loc: tuple[int | str, ...] = item["loc"]
    for step in loc:
        if isinstance(data, dict) and step in data:
            data = data[step]
        elif isinstance(data, list) and isinstance(step, int):
            data = data[step] if step < len(data) else None
        else:
            continue
        place = (*place, step)
    return (*place, loc[-1]) if item["type"] == "missing" else place


def _dotted(place: tuple[int | str, ...]) -> str:
    text = ""
    for step in place:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _sentence(item: Any) -> str:
    if item["type"] == "missing":
        return "is required"
    if item["type"] in _OBJECTS:
        message = "must be an object"
    elif item["type"] == "union_tag_invalid":
        message = f"must be of type {item['ctx']['expected_tags'].replace(', ', ' or ')}"
    elif item["type"] == "union_tag_not_found":
        message = "must have a type"
    else:
        message = str(item["msg"]).replace("Input should", "must").replace("valid list", "list")
    given = repr(item.get("input"))
    shown = given if len(given) <= 60 else f"{given[:57]}..."
    return f"{message} (got {shown})"
