"""Relative paths in a fleet file start at the folder that contains the file.

They are resolved when the file is read, since the fleet's processes run in other folders than the
shell that ran `baton up`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

_KEYS = (
    "model",
    "chat_template",
    "adapters.load",
    "adapters.folder",
    "speculation.draft",
    "logs.dir",
)
_NOT_RELATIVE = ("package:", "hub:", "~")

Settings = TypeVar("Settings", bound=BaseModel)


def with_absolute_paths(settings: Settings, folder: Path, keys: Sequence[str] = _KEYS) -> Settings:
    """Return the settings with every relative path resolved against the file's ``folder``.

    ``keys`` have a dot before a key of an inner mapping.
    """
    for key in keys:
        outer, _, inner = key.partition(".")
        value = getattr(settings, outer)
        new = with_absolute_paths(value, folder, [inner]) if inner else _absolute(value, folder)
        settings = settings.model_copy(update={outer: new})
    return settings


def _absolute(value: Any, folder: Path) -> Any:
    if isinstance(value, Mapping):
        return {name: _absolute(path, folder) for name, path in value.items()}
    if not value or value.startswith(_NOT_RELATIVE):
        return value
    return str(folder / value)
