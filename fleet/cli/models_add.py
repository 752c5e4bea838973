"""`baton models add`: a new model on a running fleet.

The fleet file remains the only description of the fleet: the command adds the model to the file
that the fleet was started with, and applies it as `baton up FILE --reconcile` does. A file that
cannot be applied is restored.
"""

import json
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from baton.config.load import ConfigError
from baton.folders import read_small
from baton.telemetry.progress import Progress
from baton.types.lanes import OF_VERSION, split_version
from fleet.cli.common import FleetOption, fail, read_fleet_file, running_fleet
from fleet.local import state as fleet_state
from fleet.local.state import FleetState


class FileEditError(ValueError):
    """A fleet file to which no model can be added."""


def add(
    models: Annotated[
        list[str],
        typer.Argument(
            help="NAME=REFERENCE, as `model` of the fleet file, or a YAML file with entries of "
            "`models`.",
            metavar="NAME=REFERENCE|FILE...",
        ),
    ],
    prefill: Annotated[
        int | None, typer.Option(min=0, help="Prefill workers. Default: the fleet's.")
    ] = None,
    decode: Annotated[
        int | None, typer.Option(min=0, help="Decode workers. Default: the fleet's.")
    ] = None,
    fleet: FleetOption = None,
) -> None:
    """Add models to the fleet that runs here, and to its fleet file.

    A NAME that the fleet has already becomes its next version, such as NAME@2. The command runs on
    the host of `baton up`, whose fleet file it changes.
    """
    from fleet.cli.lifecycle import reconcile_running  # a second, also for other commands

    state = running_fleet(fleet)
    file = Path(state.config_file)
    before = file.read_text("utf-8")
    sizes = {"prefill": prefill, "decode": decode}
    pools = {role: count for role, count in sizes.items() if count is not None}
    progress = Progress(typer.echo)
    progress.awaited = "the files of the models"
    try:
        after = with_models(before, _entries(models, pools))
        file.write_text(after, "utf-8")
        with progress.shown():
            _check(state, file)
    except (FileEditError, ConfigError, ValueError, RuntimeError, OSError) as error:
        file.write_text(before, "utf-8")
        fail(f"{error}; {file} is unchanged")
    _, config = read_fleet_file(file, None)
    try:
        reconcile_running(file, config, dry_run=False)
    except typer.Exit:
        if _rejected(state, config.models):
            file.write_text(before, "utf-8")
        raise


def with_models(text: str, added: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of a fleet file with more entries in `models`, and all else as it was.

    An entry whose name exists gets the next version of this name.

    Raises:
        FileEditError: The file has no `models`, or not one entry a line.
    """
    section = _models_of(yaml.compose(text, yaml.SafeLoader))
    names = [key.value for key, _ in section.value]
    lines = text.splitlines(keepends=True)
    last = _last_line(section)
    indent = " " * section.value[0][0].start_mark.column
    written = ""
    for name, entry in added.items():
        version = next_version(name, names)
        names.append(version)
        text_of_entry = yaml.safe_dump({version: dict(entry)}, sort_keys=False, allow_unicode=True)
        written += textwrap.indent(text_of_entry, indent)
    if not lines[last].endswith("\n"):
        lines[last] += "\n"
    return "".join([*lines[: last + 1], written, *lines[last + 1 :]])


def next_version(name: str, names: list[str]) -> str:
    """Return a name that is free: ``name`` itself, or its next version."""
    stem, _ = split_version(name)
    taken = [split_version(one)[1] for one in names if split_version(one)[0] == stem]
    if not taken or (OF_VERSION in name and name not in names):
        return name
    return f"{stem}{OF_VERSION}{max(taken) + 1}"


def _models_of(root: yaml.Node | None) -> yaml.MappingNode:
    if isinstance(root, yaml.MappingNode):
        for key, value in root.value:
            if key.value != "models":
                continue
            if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
                return value
            raise FileEditError("`models` of the fleet file must have one entry a line")
    raise FileEditError(
        "a fleet with `model` has one model: write it as an entry of `models`, and start it again"
    )


def _last_line(node: yaml.Node) -> int:
    """Return the index of the last line of a node, without the comments after it."""
    if isinstance(node, yaml.MappingNode | yaml.SequenceNode) and not node.flow_style:
        children = node.value[-1]
        return _last_line(children[-1] if isinstance(node, yaml.MappingNode) else children)
    end = node.end_mark
    return end.line - 1 if end.column == 0 and end.line > node.start_mark.line else end.line


def _entries(models: list[str], pools: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    for model in models:
        name, equals, reference = model.partition("=")
        if equals:
            here = Path(reference)
            entries[name] = {"model": os.path.abspath(here) if here.exists() else reference}  # noqa: PTH100 - keep links
        else:
            entries.update(_of_file(Path(model)))
    if pools:
        for entry in entries.values():
            entry["pools"] = {**entry.get("pools", {}), **pools}
    return entries


def _of_file(file: Path) -> dict[str, dict[str, Any]]:
    try:
        models = yaml.safe_load(read_small(file, piped=True).decode())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise FileEditError(f"{file}: {problem}: give NAME=REFERENCE, or a YAML file") from error
    if not isinstance(models, dict) or not all(
        isinstance(entry, dict) for entry in models.values()
    ):
        raise FileEditError(f"{file}: must have entries of `models`, such as `name: {{model: …}}`")
    return models


def _check(state: FleetState, file: Path) -> None:
    """Refuse a file that the fleet could not follow."""
    from fleet.cli.lifecycle import planned
    from fleet.local.checks.preflight import describe_model

    _, config = read_fleet_file(file, None)
    plan = planned(state, config)
    if plan.refused:
        raise FileEditError("; ".join(plan.refused))
    for lane in config.lanes:
        if warning := describe_model(lane, whole=True).warning:
            typer.echo(f"note: {warning}")


def _rejected(state: FleetState, names: Mapping[str, Any]) -> bool:
    """Return whether the fleet has refused its file, and serves what it served before."""
    now = fleet_state.load(state.name)
    if now is None or now.changes_done == state.changes_done:
        return False
    return not set(names) <= set(json.loads(now.config_json or "{}").get("models", ()))
