"""Options of commands that travel together: a dataclass whose fields are options."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

_BY_NAME = inspect.Parameter.KEYWORD_ONLY


def with_options(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn the fields of a function's dataclass parameters into options, except ``without``.

    Excluded fields keep their defaults.
    """

    def made(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        groups: dict[str, list[inspect.Parameter]] = {}
        shown: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(function).parameters.items():
            if is_dataclass(hints[name]):
                groups[name] = [
                    option for option in _options(hints[name]) if option.name not in without
                ]
                shown += groups[name]
            else:
                shown.append(parameter.replace(kind=_BY_NAME, annotation=hints[name]))

        @functools.wraps(function)
        def command(**given: Any) -> None:
            for name, options in groups.items():
                names = [option.name for option in options if option.name in given]
                given[name] = hints[name](**{each: given.pop(each) for each in names})
            function(**given)

        command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        command.__annotations__ = {option.name: option.annotation for option in shown}
        return command

    return made


def _options(kind: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    options = []
    for each in fields(kind):
        default = inspect.Parameter.empty if each.default is MISSING else each.default
        if each.default_factory is not MISSING:
            default = each.default_factory()
        annotation = hints[each.name]
        options.append(
            inspect.Parameter(each.name, _BY_NAME, default=default, annotation=annotation)
        )
    return options
