"""What all bodies share: the base class, and types with their limits."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

NonEmpty = Annotated[str, StringConstraints(min_length=1)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
INT32 = 2**31
# To list the faults of a million items takes a minute, in which this process does nothing else.
FIRST_FAULT = Field(fail_fast=True)
Choices = Annotated[list[NonEmpty], Field(min_length=1, max_length=4096), FIRST_FAULT]
Ids = Annotated[list[TokenId], FIRST_FAULT]
Prompts = str | Annotated[list[str], FIRST_FAULT] | Ids | Annotated[list[Ids], FIRST_FAULT]


Neutral = dict[str, Callable[[Any], bool]]


class Body(BaseModel):
    """A JSON object of a request."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    # Parameters of OpenAI's that Baton does not have, and the values that ask for nothing.
    neutral: ClassVar[Neutral] = {}


def only(*values: object) -> Callable[[Any], bool]:
    """Whether a value is one of these, and of the same type."""
    # `1 == True` in Python, so compare types as well.
    return lambda given: any(type(given) is type(value) and given == value for value in values)


def each(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Prompts one by one, each as text or as token ids."""
    if isinstance(given, str):
        return [given]
    if all(isinstance(item, int) for item in given):
        return [[item for item in given if isinstance(item, int)]]
    return [item for item in given if not isinstance(item, int)]
