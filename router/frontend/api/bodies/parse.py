"""Parsing and validation of request bodies. Errors name the field.

One call of the parser or of the validation holds the interpreter, and so the event loop, even if it
runs in a thread. Therefore the number of objects in a body is limited.
"""

from functools import cache
from typing import Any, TypeVar, get_args

import numpy as np
from pydantic import ValidationError
from pydantic_core import from_json

from baton.types.errors import InvalidRequestError
from router.frontend.api.bodies.common import Body, OperatorBody
from router.frontend.api.bodies.decimals import refuse_long_decimals
from router.frontend.api.bodies.fields import Ignored, refuse
from router.frontend.errors import MISSING_HERE, sentence
from router.sessions.hints import is_in_vain

MAX_STRUCTURES = 65_536
"""Largest number of JSON objects, arrays and names of fields in a body, which take about 40 ms."""

MAX_VALUES = 524_288
"""Largest number of elements of all arrays and objects in a body, such as token ids."""

MAX_FREE_VALUES = 131_072
"""Largest number of values in schemas and other objects of any form."""

MAX_OBJECTS = 8_192
"""Largest number of messages, parts, calls and tools in a body, which take about 40 ms."""

_MAX_FAULTS = 256  # limits the work of choosing the error that is reported
_SHOWN_CHARS = 64  # of one step of the path to an invalid value
_SLICE_BYTES = 64 * 1024
_NO_STRUCTURE = bytes(set(range(256)) - set(b'"[{:,'))

_Kind = TypeVar("_Kind", bound=Body)
_Operators = TypeVar("_Operators", bound=OperatorBody)
_Kinds = tuple[type[Body], ...]


def parse(
    kind: type[_Kind], raw: bytes, ignored: Ignored | None = None, *, model: str = ""
) -> _Kind:
    """Check a request body.

    Args:
        kind: Class of the body.
        raw: JSON text.
        ignored: Collects the names of unknown fields.
        model: Default of the field ``model``.

    Raises:
        InvalidRequestError: The body is not a JSON object, or a parameter is invalid.
        GrammarError: A schema has a number that would change.
    """
    data = decoded(raw)
    refuse_long_decimals(raw, data)
    return checked(kind, data, ignored, model=model)


def parse_operators(kind: type[_Operators], raw: bytes) -> _Operators:
    """Check a body of an operator, of which errors show no value; see `parse`."""
    data = decoded(raw)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _first_error(error, data, shows_value=False) from error


def decoded(raw: bytes) -> dict[str, Any]:
    """Return the fields of a JSON object.

    Raises:
        InvalidRequestError: The text is not a JSON object, or has too many parts.
    """
    _check_structure(raw)
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return data


def checked(
    kind: type[_Kind], data: dict[str, Any], ignored: Ignored | None = None, *, model: str = ""
) -> _Kind:
    """Check a request body that is already decoded; see `parse`."""
    data = _Sieve(Ignored() if ignored is None else ignored).known((kind,), data, "", "")
    if model and data.get("model") is None:
        data["model"] = model
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _first_error(error, data) from error


def _check_structure(raw: bytes) -> None:
    """Reject a JSON text of more than `MAX_STRUCTURES`, or of more than `MAX_VALUES`."""
    if len(raw) <= MAX_STRUCTURES:
        return
    written = np.frombuffer(raw, np.uint8)  # counted a fifth as fast by `bytes.count`
    many = sum(np.count_nonzero(written == byte) for byte in b"[{:") > MAX_STRUCTURES
    if not many and np.count_nonzero(written == ord(",")) <= MAX_VALUES:
        return
    kept = raw.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_STRUCTURE)
    count = 0
    commas = 0
    in_string = 0
    for begin in range(0, len(kept), _SLICE_BYTES):
        parts = kept[begin : begin + _SLICE_BYTES].split(b'"')
        outside = b"".join(parts[in_string::2])
        separators = outside.count(b",")
        commas += separators
        count += len(outside) - separators
        in_string = (in_string + len(parts) - 1) % 2
    if count > MAX_STRUCTURES:
        raise InvalidRequestError(
            f"the body has {count} JSON objects, arrays and names of fields, the limit is "
            f"{MAX_STRUCTURES}; send fewer, larger ones"
        )
    if commas > MAX_VALUES:
        raise InvalidRequestError(
            f"the body has {commas} elements of arrays and objects, the limit is {MAX_VALUES}"
        )


class _Sieve:
    """Removes all fields from a body that its class does not define."""

    def __init__(self, ignored: Ignored) -> None:
        self._ignored = ignored
        self._objects = 0
        self._free_values = 0

    def known(self, kinds: _Kinds, data: dict[str, Any], place: str, where: str) -> dict[str, Any]:
        """Return the fields that at least one of the classes defines.

        Args:
            kinds: Possible classes of the object.
            data: The object.
            place: Path of such objects, with ``[]`` for an index and a dot at the end.
            where: Exact path of this object.
        """
        self._objects += 1
        if self._objects > MAX_OBJECTS:
            raise InvalidRequestError(
                f"the body has more than {MAX_OBJECTS} messages, parts, calls and tools; "
                "join some of them"
            )
        known = _fields(kinds)
        kept = {}
        for name, value in data.items():
            inner = known.get(name)
            if value is None and name in _optional(kinds):
                continue  # null is the default
            if inner is None:
                self._other(kinds, data, name, place, where)
            elif inner and isinstance(value, dict | list):
                kept[name] = self._inside(inner, value, f"{place}{name}", f"{where}{name}")
            else:
                kept[name] = value
                if isinstance(value, dict):
                    self._count_values(value, f"{where}{name}")
        return kept

    def _count_values(self, value: dict[str, Any], where: str) -> None:
        """Reject more than `MAX_FREE_VALUES` in objects of any form, which are encoded again."""
        rest: list[Any] = [value]
        while rest:
            item = rest.pop()
            self._free_values += len(item)
            if self._free_values > MAX_FREE_VALUES:
                raise InvalidRequestError.at(
                    where, f"has more than {MAX_FREE_VALUES} values together with other objects"
                )
            inner = item.values() if isinstance(item, dict) else item
            rest += [value for value in inner if isinstance(value, dict | list)]

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
            if kind.used_types and data.get("type") not in kind.used_types:
                return
            if name in kind.accepted:
                if is_in_vain(name, value):
                    self._ignored.hint(f"{place}{name}")
                return
            rule = kind.refused.get(name)
            if rule is None:
                continue
            if name == "best_of" and value == data.get("n"):
                return
            refuse(name, where, rule, value)
            return
        self._ignored.add(f"{place}{name}", f"{where}{name}")


@cache
def _fields(kinds: _Kinds) -> dict[str, _Kinds]:
    """Return for each field the classes of the objects that it may contain."""
    classes: dict[str, _Kinds] = {}
    for kind in kinds:
        for name, field in kind.model_fields.items():
            alias = field.alias or name
            classes[alias] = (*classes.get(alias, ()), *_bodies_in(field.annotation))
    return classes


@cache
def _optional(kinds: _Kinds) -> frozenset[str]:
    return frozenset(
        field.alias or name
        for kind in kinds
        for name, field in kind.model_fields.items()
        if not field.is_required()
    )


def _bodies_in(annotation: Any) -> _Kinds:
    if isinstance(annotation, type) and issubclass(annotation, Body):
        return (annotation,)
    return tuple(kind for inner in get_args(annotation) for kind in _bodies_in(inner))


def _first_error(
    error: ValidationError, data: Any, *, shows_value: bool = True
) -> InvalidRequestError:
    """Report the first invalid field. Of a union, report the branches that matched deepest."""
    if error.error_count() > _MAX_FAULTS:
        return InvalidRequestError(
            f"the body has {error.error_count()} invalid values, too many to list"
        )
    listed = error.errors(include_url=False, include_input=shows_value)
    placed = [(_place(item, data), item) for item in listed]
    first = placed[0][0][:1]
    same = [(place, item) for place, item in placed if place[:1] == first]
    depth = max(len(place) for place, _ in same)
    deepest = [(place, item) for place, item in same if len(place) == depth]
    param = _dotted(deepest[0][0])
    faults = [item for place, item in deepest if place == deepest[0][0]]
    # A branch of the right type is the one that the client meant.
    meant = [item for item in faults if not item["type"].endswith("_type")] or faults
    reasons = dict.fromkeys(map(sentence, meant))
    return InvalidRequestError.at(param, f"{' or '.join(reasons)}")


def _place(item: Any, data: Any) -> tuple[int | str, ...]:
    """Return the path of an error without pydantic's additions, such as union branches."""
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
    if item["type"] == "missing":
        return (*place, loc[-1])
    return (*place, item["ctx"]["field"]) if item["type"] == MISSING_HERE else place


def _dotted(place: tuple[int | str, ...]) -> str:
    text = ""
    for step in place:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            name = step[:_SHOWN_CHARS]  # a client's key may have megabytes, and errors are kept
            text += f".{name}" if text else name
    return text
