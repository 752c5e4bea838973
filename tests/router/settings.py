"""Settings of routers in tests."""

from dataclasses import fields
from typing import Any

from baton.config.fleet_file import DEFAULT_MODEL
from router.process_core import ProcessCore
from router.settings import LaneSettings, ProcessSettings

_OF_CORE = {field.name for field in fields(ProcessCore)}
OF_LANE = {field.name for field in fields(LaneSettings)}
_OF_PROCESS = {field.name for field in fields(ProcessSettings)} - {"fleet"}


def settings_of(*names: str, **given: Any) -> tuple[ProcessCore, LaneSettings]:
    """Core of a process and settings of its lane; each keyword is a field of one of them."""
    core = {name: given.pop(name) for name in given.keys() & _OF_CORE}
    process = {name: given.pop(name) for name in given.keys() & _OF_PROCESS}
    lane = LaneSettings(model=DEFAULT_MODEL, model_names=names or ("m",), **given)
    return ProcessCore(settings=ProcessSettings(**process), **core), lane
