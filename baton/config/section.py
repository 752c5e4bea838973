"""Base class of the fleet file's sections."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from baton.config.other_words import respelled


class Section(BaseModel):
    """Immutable section that refuses unknown keys and wrong types.

    Attributes:
        removed: Keys of earlier versions, and what to write instead.
        other_words: Other spellings of keys.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    removed: ClassVar[Mapping[str, str]] = MappingProxyType({})
    other_words: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @model_validator(mode="before")
    @classmethod
    def _refuse_removed_and_respell(cls, value: Any) -> Any:
        for key, instead in cls.removed.items():
            if isinstance(value, dict) and key in value:
                raise ValueError(f"`{key}` is not supported: {instead}")
        return respelled(value, cls.other_words) if isinstance(value, dict) else value


_LIMITS = {
    "greater_than_equal": ("ge", "must be at least {}"),
    "greater_than": ("gt", "must be greater than {}"),
    "less_than_equal": ("le", "must be at most {}"),
    "string_too_short": ("min_length", "must have at least {} characters"),
    "string_too_long": ("max_length", "must have at most {} characters"),
    "string_pattern_mismatch": ("pattern", "must match {}"),
    "literal_error": ("expected", "must be {}"),
}


def problem_of(item: Any) -> str:
    """Return what is wrong in an error of pydantic."""
    context = item.get("ctx") or {}
    if item["type"] in _LIMITS:
        key, sentence = _LIMITS[item["type"]]
        return sentence.format(context[key])
    if item["type"] == "value_error":
        return str(context["error"])
    if item["type"] == "missing":
        return f"the key `{item['loc'][-1]}` is missing"
    message = re.sub(r"^Input should be ", "must be ", str(item["msg"]))
    return message[0].lower() + message[1:]
