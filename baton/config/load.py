"""Loader of fleet files. An error has the line, the value and its limit.

An example:

    deploy/local.yaml:14: pools.decode = -1: must be at least 0
"""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from baton.config.fleet_file import FleetConfig
from baton.config.other_words import own_path
from baton.config.section import problem_of
from baton.config.yaml_text import KeyPath, YamlTextError, dotted, parse_yaml
from baton.folders import read_small

# keys of paths; relative ones start at the folder that contains the file, since the fleet's
# processes run in other folders than the shell that ran `baton up`
_PATHS = (
    "model",
    "chat_template",
    "adapters.load",
    "adapters.folder",
    "speculation.draft",
    "logs.dir",
)
_LANE_PATHS = (*_PATHS, "gates.golden", "gates.signature", "gates.verify_key")
_NOT_RELATIVE = ("package:", "hub:", "~")
_Settings = TypeVar("_Settings", bound=BaseModel)


class ConfigError(ValueError):
    """Unusable fleet file; the message is complete and meant for the user."""


class _Source(NamedTuple):
    lines: dict[KeyPath, int]  # counted from 1
    name: str


def load_config(
    path: str | Path, overrides: Mapping[str, object] | None = None, *, said_by: str = "override"
) -> FleetConfig:
    """Read a fleet file. Relative paths in it start at the folder that contains it.

    Args:
        path: Path of the YAML file.
        overrides: Top-level keys that replace the file's, such as ``{"port": 9000}``.
        said_by: Source of the overrides for messages (``"BATON_PORT"``, ``"--port"``).

    Raises:
        ConfigError: The file is invalid; the message has one line per problem.
    """
    file = Path(path)
    try:
        text = read_small(file, piped=True).decode()
    except OSError as error:
        raise ConfigError(f"{file}: cannot read the fleet file: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text") from error
    try:
        parsed = parse_yaml(text, "a fleet file", _redact)
    except YamlTextError as error:
        raise ConfigError(f"{file}:{error}") from error
    lines = {own_path(path): line for path, line in parsed.lines.items()} | parsed.lines
    source = _Source(lines, str(file))
    changes = dict(overrides or {})
    config = _validated(parsed.data, source)
    if changes:
        config = _validated({**parsed.data, **changes}, source, changes, said_by)
    folder = file.absolute().parent
    lanes = {}
    for name, lane in config.models.items():
        own = [key for key in _LANE_PATHS if key.partition(".")[0] in lane.model_fields_set]
        lanes[name] = _with_absolute_paths(lane, folder, own)
    return _with_absolute_paths(config, folder).model_copy(update={"models": lanes})


def _validated(
    data: Mapping[str, object],
    source: _Source,
    changes: Mapping[str, object] = MappingProxyType({}),
    said_by: str = "",
) -> FleetConfig:
    try:
        return FleetConfig.model_validate(data)
    except ValidationError as error:
        found = sorted(
            error.errors(),
            key=lambda item: source.lines.get(_known_path(item["loc"], source), math.inf),
        )
        lines = [_explain(item, source, changes, said_by) for item in found]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from error


def _explain(item: Any, source: _Source, changes: Mapping[str, object], said_by: str) -> str:
    path = _known_path(item["loc"], source)
    if not path:
        return f"{source.name}: {problem_of(item)}"
    line = source.lines.get(path)  # None: a default that does not fit the other settings
    file = f"{source.name}:{line}" if line else source.name
    place = said_by if path[0] in changes else file
    public = _redact(path)
    if item["type"] == "extra_forbidden":
        return f"{place}: {dotted(public)}: unknown key{_suggestion(public)}"
    secret = path[0] == "redis" or (path[0] == "api_keys" and not path[2:])
    if "servers" in path:  # whose URLs may have one, though they must not
        secret = not {"@", "?"}.isdisjoint(f"{item['input']}")
    shown = "" if secret else f" = {_short(item['input'])}"
    return f"{place}: {dotted(public)}{shown}: {problem_of(item)}"


def _redact(path: KeyPath) -> KeyPath:
    """Return a path without an API key, which is a secret."""
    return ("api_keys", "…", *path[2:]) if path[0] == "api_keys" and path[1:] else path


def _known_path(location: KeyPath, source: _Source) -> KeyPath:
    """Return ``location`` without pydantic's own steps (union branches, constraint names)."""
    path: KeyPath = ()
    for step in location:
        if not path or (*path, step) in source.lines:
            path = (*path, step)
    return path


def _suggestion(path: KeyPath) -> str:
    keys = _section_at(path[:-1]).model_fields
    near = difflib.get_close_matches(str(path[-1]), keys, n=1)
    hint = f"; did you mean `{near[0]}`?" if near else ""
    return f"{hint} (known keys: {', '.join(keys)})"


def _section_at(path: KeyPath) -> type[BaseModel]:
    """Return the section that a key belongs to whose section has this path."""
    section: type[BaseModel] = FleetConfig
    is_name = False  # of a model or an API key
    for step in path:
        key = "list" if isinstance(step, int) else step  # a list is short for this key
        if not is_name and key in section.model_fields:
            section = next(_sections_in(section.model_fields[key].annotation), section)
            is_name = key in ("models", "api_keys")
        else:
            is_name = False
    return section


def _sections_in(kind: Any) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from _sections_in(part)


def _short(value: object) -> str:
    is_huge = isinstance(value, int) and value.bit_length() > 200
    text = "a huge number" if is_huge else repr(value)  # Python spells no longer ones
    return text if len(text) <= 60 else f"{text[:57]}..."


def _with_absolute_paths(
    settings: _Settings, folder: Path, keys: Sequence[str] = _PATHS
) -> _Settings:
    for key in keys:
        outer, _, inner = key.partition(".")
        value = getattr(settings, outer)
        new = _with_absolute_paths(value, folder, [inner]) if inner else _absolute(value, folder)
        settings = settings.model_copy(update={outer: new})
    return settings


def _absolute(value: Any, folder: Path) -> Any:
    if isinstance(value, Mapping):
        return {name: _absolute(path, folder) for name, path in value.items()}
    if not value or value.startswith(_NOT_RELATIVE):
        return value
    return str(folder / value)
