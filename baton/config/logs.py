"""What the fleet file says of logs: their layout, and what of a request they may hold."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

# Each is a guess at what a text holds, and none is a proof that it holds no more.
DEFAULT_REDACT: Mapping[str, str] = {
    "email": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    "card": r"\b\d(?:[ -]?\d){12,18}\b",
    "secret": r"\b(?:sk|pk|ghp|gho|xox[abp]|AKIA)[-_A-Za-z0-9]{12,}\b",
}


class LogsConfig(BaseModel):
    """Logs of every process of the fleet.

    Attributes:
        dir: Where they are; unless said, in the fleet's state folder.
        format: ``json`` is one object a line.
        requests: The router writes a line for every request that is over.
        redact: Name to regular expression. In prompts and answers, which only requests of keys
            with ``log_text: true`` have in the log, what matches becomes ``[name]``. Adds to
            `DEFAULT_REDACT`; an empty expression takes one of these away.
        max_text_chars: Of a prompt or an answer; the rest is cut off.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    dir: str | None = None
    format: Literal["text", "json"] = "text"
    requests: bool = False
    redact: Mapping[str, str] = {}
    max_text_chars: Annotated[int, Field(ge=1, le=1_000_000)] = 4096

    @field_validator("redact")
    @classmethod
    def _expressions_can_be_read(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for name, expression in value.items():
            try:
                matches_nothing = re.compile(expression).match("") is not None
            except re.error as error:
                raise ValueError(f"{name}: not a regular expression: {error}") from error
            if expression and matches_nothing:
                raise ValueError(f"{name}: matches an empty text, so it would match everywhere")
        return value

    @property
    def rules(self) -> Mapping[str, str]:
        """What is redacted: the default rules and the file's own."""
        merged = {**DEFAULT_REDACT, **self.redact}
        return {name: expression for name, expression in merged.items() if expression}
