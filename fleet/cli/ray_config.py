"""`baton config import`: the fleet file that files of Ray Serve LLM (`LLMConfig`) stand for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from baton.config.external_engine import TAKEN
from baton.config.lane import LaneConfig
from baton.folders import read_small
from fleet.cli.common import fail
from fleet.cli.vllm_flags import FlagError, keys_of, reference, text_of, whole

_PARTS = ("model_loading_config", "engine_kwargs", "deployment_config", "lora_config")


def config_import(
    file: Annotated[Path, typer.Argument(help="LLMConfig, a list of them, or a Serve config.")],
    vllm: Annotated[
        str | None,
        typer.Option(help="Python interpreter of vLLM on all hosts. Default: Baton's engine."),
    ] = None,
) -> None:
    """Print the fleet file that a YAML file of Ray Serve LLM stands for, and what it leaves out."""
    try:
        configs = list(_configs(yaml.safe_load(read_small(file, piped=True).decode())))
        left_out: list[str] = []
        text = text_of(_joined([_fleet_of(each, vllm, left_out) for each in configs], left_out))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        fail(f"{file}: is no LLMConfig of Ray Serve LLM: {error}")
    for line in left_out:
        typer.echo(f"# left out: {' '.join(line.split())}")
    typer.echo(text, nl=False)


def _configs(loaded: Any) -> Iterator[dict[str, Any]]:
    if isinstance(loaded, list):
        for each in loaded:
            yield from _configs(each)
    elif "applications" in loaded:
        yield from _configs([each["args"]["llm_configs"] for each in loaded["applications"]])
    else:
        yield loaded


def _fleet_of(config: dict[str, Any], python: str | None, left_out: list[str]) -> dict[str, Any]:
    """Return the fleet file keys of one model; append to ``left_out`` what has none."""
    parts = [(part, config.get(part) or {}) for part in _PARTS]
    rest = {f"{part}.{key}": value for part, keys in parts for key, value in keys.items()}
    rest |= {key: value for key, value in config.items() if key not in _PARTS}
    if rest.get("llm_engine") == "vLLM":  # whose words `engine_kwargs` has
        del rest["llm_engine"]
    name = rest.pop("model_loading_config.model_id")
    source = rest.pop("model_loading_config.model_source", None) or name
    if not isinstance(source, str) or "://" in source:
        raise FlagError(f"model_source {source}: download the model, and name its folder")
    words: list[str] = []
    rest = {key: value for key, value in rest.items() if value is not None}
    for key in [key for key in rest if key.startswith("engine_kwargs.")]:
        more = _words(key.partition(".")[2], rest[key])
        try:
            _, _, args = keys_of(more, by_vllm=python is not None)
            if not (args and args[0] in TAKEN):
                words += more
                del rest[key]
        except FlagError as error:
            rest[key] = error
    _, keys, args = keys_of(words, by_vllm=python is not None)
    if isinstance(rest.get("deployment_config.num_replicas"), int):
        keys.setdefault("pools", {})["decode"] = rest.pop("deployment_config.num_replicas")
    if "lora_config.max_num_adapters_per_replica" in rest:
        most = rest.pop("lora_config.max_num_adapters_per_replica")
        keys.setdefault("adapters", {})["max_loaded"] = most
    left_out += [f"{name}: {key}: {value}" for key, value in rest.items()]
    return {"model": reference(source), "served_model_name": [name], **whole(keys, python, args)}


def _words(key: str, value: Any) -> list[str]:
    flag = f"--{key.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    values = value if isinstance(value, list) else [value]
    return [flag, *(json.dumps(each) if isinstance(each, dict) else str(each) for each in values)]


def _joined(fleets: list[dict[str, Any]], left_out: list[str]) -> dict[str, Any]:
    """Return the file of one model, or of several: their common keys become those of the fleet."""
    if len(fleets) == 1:
        return {"fleet": "imported", **fleets[0]}
    joined: dict[str, Any] = {"fleet": "imported", "models": {}}
    for fleet in fleets:
        (name,) = fleet.pop("served_model_name")
        lane = joined["models"].setdefault(name.rpartition("/")[2], {})
        for key, value in fleet.items():
            if key in LaneConfig.model_fields:
                lane[key] = value
            elif joined.setdefault(key, value) != value:
                left_out.append(f"{name}: {key}: {value}, as another model has {joined[key]}")
    return joined
