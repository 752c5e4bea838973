"""Fleet file section on logs: format, and request content that they may contain."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator

from baton.config.section import Section

# Heuristics: none proves that a text contains nothing else that is private.
DEFAULT_REDACT: Mapping[str, str] = {
    "email": r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+",
    "card": r"\b\d(?:[ -]?\d){12,18}\b",
    "secret": r"\b(?:sk|pk|ghp|gho|xox[abp]|AKIA)[-_A-Za-z0-9]{12,}\b",
}


class LogsConfig(Section):
    """Logs of every process of the fleet.

    Attributes:
        redact: Mapping of names to regular expressions. Matches in logged prompts and responses
            (keys with ``log_text: true``) become ``[name]``. Adds to `DEFAULT_REDACT`; an empty
            expression removes a default.
        max_text_chars: Longest prompt or response in characters; the rest is cut off.
    """

    dir: str | None = None  # folder of the log files; default: in the fleet's state folder
    format: Literal["text", "json"] = "text"  # line format; ``json`` is one object per line
    requests: bool = False  # let the router log one line per finished request
    redact: Mapping[str, str] = {}
    max_text_chars: Annotated[int, Field(ge=1, le=1_000_000)] = 4096

    @field_validator("redact")
    @classmethod
    def _check_expressions(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for name, expression in value.items():
            try:
                matches_nothing = re.compile(expression).match("") is not None
            except re.error as error:
                raise ValueError(f"{name}: not a regular expression: {error}") from error
            if expression and matches_nothing:
                raise ValueError(f"{name}: matches the empty text, so it would match everywhere")
        return value

    @property
    def rules(self) -> Mapping[str, str]:
        """Redaction rules: the defaults and the file's own."""
        merged = {**DEFAULT_REDACT, **self.redact}
        return {name: expression for name, expression in merged.items() if expression}
