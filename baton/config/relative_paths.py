"""Relative paths in a fleet file: they start at the folder that holds the file.

They are resolved when the file is read, since the processes of a fleet have other current folders
than the shell in which somebody typed `baton up`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

_KEYS = (
    *("model", "chat_template", "adapters.load", "adapters.folder"),
    *("speculation.draft", "logs.dir"),
)
_NOT_RELATIVE = ("package:", "hub:", "~")

Settings = TypeVar("Settings", bound=BaseModel)


def with_absolute_paths(settings: Settings, folder: Path, keys: Sequence[str] = _KEYS) -> Settings:
    """The same settings, with every relative path resolved.

    Args:
        settings: As the file says them.
        folder: The absolute path of the folder that holds the file.
        keys: Of the paths, with a dot before a key of an inner mapping.
    """
    for key in keys:
        outer, _, inner = key.partition(".")
        value = getattr(settings, outer)
        new = with_absolute_paths(value, folder, [inner]) if inner else _absolute(value, folder)
        settings = settings.model_copy(update={outer: new})
    return settings


def _absolute(value: Any, folder: Path) -> Any:
    """A path, a mapping of names to paths, or None."""
    if isinstance(value, Mapping):
        return {name: _absolute(path, folder) for name, path in value.items()}
    if not value or value.startswith(_NOT_RELATIVE):
        return value
    return str(folder / value)
