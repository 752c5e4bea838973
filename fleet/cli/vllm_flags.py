"""Flags of ``vllm serve`` and the fleet file keys that they stand for: one table, `FLAGS`."""

import argparse
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml
from pydantic import ValidationError

from baton.config.fleet_file import FleetConfig
from baton.config.other_words import OTHER_WORDS
from baton.config.section import problem_of
from baton.config.yaml_text import dotted

_SIZE = re.compile(r"(\d+)([kKmMgGtT]?)|(\d*\.\d+)([kmgt])")
_NAME = re.compile(r"^--\w[\w-]*")
_PAIR = ("name", "path")
_MOST_NAME_CHARS = 255  # of a path relative to this folder
_WORDS = {
    **dict.fromkeys(("bfloat16", "bf16"), "bf16"),
    **dict.fromkeys(("float", "float32"), "fp32"),
    **dict.fromkeys(("fp8", "fp8_e4m3"), "fp8"),
    "int8": "int8",
    "auto": None,
}  # types of numbers


class FlagError(ValueError):
    """A flag cannot be used; the message has the flag and what to write instead."""


class Flag(NamedTuple):
    """Flag of vLLM, and the key of the fleet file in dotted form."""

    names: str
    key: str
    read: Callable[[Any], Any] = str  # from words to the key's value; None leaves the key out
    own: bool = False  # an argument of vLLM itself where vLLM runs the model
    nargs: int | str | None = None  # number of words, as argparse counts them


def _size(text: str) -> int:
    """Return a number with a unit: k is 1,000, K is 1,024."""
    matched = _SIZE.fullmatch(text)
    if matched is None:
        raise ValueError("must be a number, such as 8192 or 8k")
    unit = matched[2] or matched[4] or ""
    power = "kmgt".find(unit.lower()) + 1 if unit else 0
    return int(float(matched[1] or matched[3]) * (1000 if unit.islower() else 1024) ** power)


def _context(text: str) -> int | None:
    return None if text in ("auto", "-1") else _size(text)


def _word(text: str) -> str | None:
    if text not in _WORDS:
        raise ValueError(f"must be one of {', '.join(_WORDS)}")
    return _WORDS[text]


def _adapters(words: list[str]) -> dict[str, str]:
    """Return the paths of adapters by name, from NAME=PATH or vLLM's JSON for one."""
    given = [dict(_pair(word)) for word in words]
    if odd := {key for each in given for key in each} - {*_PAIR, "base_model_name"}:
        raise ValueError(f"{', '.join(sorted(odd))}: no such thing")
    return {each["name"]: _file(each["path"]) for each in given}


def _pair(word: str) -> Any:
    return json.loads(word) if word[:1] == "{" else zip(_PAIR, word.split("=", 1), strict=True)


def _file(text: str) -> str:
    return str(Path(text).absolute())


FLAGS = (
    Flag("--host", "host"),
    Flag("--port", "port", int),
    Flag("--served-model-name", "served_model_name", list, nargs="+"),
    Flag("--chat-template", "chat_template", _file),
    Flag("--max-model-len", OTHER_WORDS["max_model_len"], _context),
    Flag("--max-num-seqs", OTHER_WORDS["max_num_seqs"], int),
    Flag("--max-num-batched-tokens", OTHER_WORDS["max_num_batched_tokens"], _size, own=True),
    Flag("--tensor-parallel-size -tp", OTHER_WORDS["tensor_parallel_size"], int, own=True),
    Flag("--data-parallel-size -dp", "pools.decode", int),
    Flag("--num-gpu-blocks-override", "kv_blocks_per_worker", int, own=True),
    Flag("--dtype", "dtype", _word, own=True),
    Flag("--quantization -q", OTHER_WORDS["quantization"], own=True),
    Flag("--kv-cache-dtype", "quantisation.kv", _word, own=True),
    Flag("--enable-lora --no-enable-lora --disable-lora", "", lambda _: None, own=True, nargs=0),
    Flag("--lora-modules", "adapters.load", _adapters, nargs="+"),
    Flag("--max-loras", OTHER_WORDS["max_loras"], int, own=True),
    Flag("--max-lora-rank", OTHER_WORDS["max_lora_rank"], int, own=True),
    Flag("--api-key", "api_keys", lambda keys: dict.fromkeys(keys, "default"), nargs="+"),
    Flag("--ssl-certfile", "clients.tls.certificate", _file),
    Flag("--ssl-keyfile", "clients.tls.key", _file),
    Flag("--insecure", "clients.insecure", bool, nargs=0),  # Baton's own: plain text to other hosts
)
_ALWAYS = "Baton always does: leave it out"
_BLOCKS = "set the number of KV blocks by --num-gpu-blocks-override"
INSTEAD = {
    "--enable-prefix-caching": _ALWAYS,
    "--enable-chunked-prefill": _ALWAYS,
    "--enable-auto-tool-choice": _ALWAYS,
    "--tool-call-parser": _ALWAYS,
    "--reasoning-parser": _ALWAYS,
    **dict.fromkeys(("--gpu-memory-utilization", "--device-memory-utilization"), _BLOCKS),
    "--kv-cache-memory-bytes": _BLOCKS,
    **dict.fromkeys(("--speculative-config", "-sc"), "set `speculation` in a fleet file"),
    "--kv-transfer-config": "set `pools: {prefill: 1, decode: 1}` in a fleet file",
}
"""Flags without a key, and what takes their place."""


class _Words(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(message)


def keys_of(words: list[str], *, by_vllm: bool) -> tuple[str | None, dict[str, Any], list[str]]:
    """Return the model, the keys of flags, and, only ``by_vllm``, the words that are vLLM's."""
    first = words[:1] if words and not words[0].startswith("-") else []
    parser = _Words(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default=first[0] if first else None)
    parser.add_argument("--revision")
    flags = [flag for flag in FLAGS if not (by_vllm and flag.own)]
    for flag in flags:
        alone = {"action": "store_true", "default": None}
        options: dict[str, Any] = alone if flag.nargs == 0 else {"nargs": flag.nargs}
        parser.add_argument(*flag.names.split(), dest=flag.names, **options)
    dashed = [  # vLLM takes underscores, too
        _NAME.sub(lambda name: name[0].replace("_", "-"), word) for word in words[len(first) :]
    ]
    given, rest = parser.parse_known_args(dashed)
    if rest and not by_vllm:
        raise FlagError(_why_not(rest[0].partition("=")[0]))
    keys: dict[str, Any] = {}
    for flag in flags:
        if (value := getattr(given, flag.names)) is None:
            continue
        try:
            meant = flag.read(value)
        except (ValueError, KeyError, TypeError) as error:
            raise FlagError(f"{flag.names.split()[0]} {value}: {error}") from error
        if meant is None:
            continue
        *path, last = flag.key.split(".")
        place = keys
        for part in path:
            place = place.setdefault(part, {})
        place[last] = meant
    return reference(given.model, given.revision), keys, rest


def _why_not(name: str) -> str:
    if not name.startswith("-"):
        return f"{name}: is no flag; the model is the first word"
    other = "no such thing; docs/reference/fleet-file.md lists the keys that Baton has"
    if INSTEAD.get(name.replace("--no-", "--", 1)) == _ALWAYS and name.startswith("--no-"):
        other = "Baton cannot switch it off"
    return f"{name}: {INSTEAD.get(name.partition('.')[0], other)}"


def reference(model: str | None, revision: str | None = None) -> str | None:
    """Return a model as a fleet file names it; what is no file here is a repository of the hub."""
    if model is None or ":" in model:
        return model
    is_name = len(model) > _MOST_NAME_CHARS or not Path(model).exists()
    if model.startswith(("/", ".")) or not is_name:
        return _file(model)
    return f"hub:{model}" + (f"@{revision}" if revision else "")


def text_of(config: Mapping[str, Any]) -> str:
    """Return the text of a fleet file. Raises FlagError if its keys are wrong."""
    try:
        FleetConfig.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        raise FlagError(f"{dotted(first['loc'])}: {problem_of(first)}") from error
    return yaml.safe_dump(config, sort_keys=False)


def whole(keys: Mapping[str, Any], python: str | None, args: list[str]) -> dict[str, Any]:
    """Return the keys of a fleet: one worker, of Baton's engine or of vLLM in ``python``."""
    pools = {"prefill": 0, "decode": 1, **keys.get("pools", {})}
    if python is None:
        return {**keys, "pools": pools}
    vllm = {"python": python, **({"args": args} if args else {})}
    return {**keys, "numerics": "fast", "pools": {**pools, "engine": "vllm", "vllm": vllm}}
