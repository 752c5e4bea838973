"""Generates ``docs/reference/model-files.md``; ``tests/house/reference.py`` writes it."""

from collections.abc import Iterable, Mapping

from baton.model.gguf_config import KEYS
from baton.model.gguf_file import READABLE
from baton.model.hf_keys import CONFIG_KEYS, HONOURED, NO_EFFECT, ROPE_KEYS, Rule
from baton.model.hf_quantisation import METHODS
from baton.model.model_config import GGUF_FAMILIES, HF_FAMILIES, ROPE_TYPES
from baton.model.token_keys import (
    GENERATION_CONFIG,
    GGUF,
    TOKENIZER_CONFIG,
)
from baton.text.gguf_words import CUTS

HEAD = """\
# Model files

Formats and keys that Baton reads. `baton models check MODEL` shows what a model has and
what would be refused. [Configuration](../guide/configuration.md#models) describes the references.
"""
_TABLES = {
    "config.json": CONFIG_KEYS,
    "rope_scaling and rope_parameters": ROPE_KEYS,
    "tokenizer_config.json": TOKENIZER_CONFIG,
    "generation_config.json": GENERATION_CONFIG,
    "GGUF metadata": {**{f"ARCHITECTURE.{key}": rule for key, rule in KEYS.items()}, **GGUF},
}


def sections() -> list[str]:
    """Return the sections of the page."""
    found = ["[Families](../guide/models.md#families) are in the guide.\n"]
    found += [f"RoPE scaling: {_names(ROPE_TYPES)}.\n"]
    found += [f"Quantised safetensors: {_names(METHODS)}.\n", "## GGUF\n"]
    found += [f"Types of tensors: {_names(sorted(kind.name for kind in READABLE))}.\n"]
    found += [f"Pre-tokenizers (`tokenizer.ggml.pre`): {_names(sorted(CUTS))}.\n"]
    for title, rules in _TABLES.items():
        found += [f"## Keys of {title}\n", *_keys(rules), ""]
    return found


def families() -> str:
    """Return the table of families in ``docs/guide/models.md``."""
    rows = ["|family|Hugging Face|GGUF|", "|---|---|---|"]
    for name, theirs, in_gguf in _families():
        rows.append(f"|{name}|{_names(theirs)}|{_names(in_gguf)}|")
    return "\n".join(rows)


def _families() -> list[tuple[str, list[str], list[str]]]:
    both = (HF_FAMILIES, GGUF_FAMILIES)
    names = dict.fromkeys(family for table in both for family in table.values())
    return [
        (name, *([key for key, family in table.items() if family == name] for table in both))
        for name in names
    ]


def _keys(rules: Mapping[str, Rule]) -> list[str]:
    kinds = {"honoured": HONOURED, "no effect": NO_EFFECT}
    rows = [
        f"| {title} | {_names([key for key, rule in rules.items() if rule == kind])} |"
        for title, kind in kinds.items()
    ]
    refused = [key for key, rule in rules.items() if isinstance(rule, tuple)]
    rows.append(f"| refused, unless off | {_names(refused)} |")
    return ["| effect | keys |", "|---|---|", *rows]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "–"
