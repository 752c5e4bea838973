"""Base class of the fleet file's sections."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Immutable section that refuses unknown keys and wrong types."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
