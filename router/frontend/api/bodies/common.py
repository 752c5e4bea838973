"""Base classes of request bodies, and field types with their limits."""

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from router.frontend.api.bodies.fields import Refused
from router.frontend.errors import MISSING_HERE

NonEmpty = Annotated[str, StringConstraints(min_length=1)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:/-]{1,256}$")]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
INT32 = 2**31
# Listing the errors of a million items would block the process for a minute.
FIRST_FAULT = Field(fail_fast=True)
Choices = Annotated[list[NonEmpty], Field(min_length=1, max_length=4096), FIRST_FAULT]
Ids = Annotated[list[TokenId], FIRST_FAULT]
Prompts = str | Annotated[list[str], FIRST_FAULT] | Ids | Annotated[list[Ids], FIRST_FAULT]
# Number of last prompt tokens to keep; -1: as many as leave room for the answer.
Truncation = Annotated[int, Field(ge=-1, lt=INT32)]


def missing_here(field: str) -> PydanticCustomError:
    """Return the error of an object without ``field``, for a validator of its class."""
    return PydanticCustomError(MISSING_HERE, "is required", {"field": field})


class OperatorBody(BaseModel):
    """A JSON object of an operator's request, read by ``parse_operators``."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_default(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: v for name, v in data.items() if v is not None or name not in optional}


class Body(BaseModel):
    """A JSON object of a request.

    Values are converted by pydantic's rules for JSON: ``"0.5"`` becomes 0.5, and 5.0 becomes 5 in
    an integer field. Values out of range are rejected. ``parse`` looks up all other fields in
    ``accepted`` and ``refused``.
    """

    model_config = ConfigDict(
        extra="ignore", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    accepted: ClassVar[dict[str, str]] = {}  # field to the reason why it has no effect
    refused: ClassVar[dict[str, Refused]] = {}
    used_types: ClassVar[tuple[str | None, ...]] = ()
    """Types of objects that are used; others are left out as a whole. Empty: all types."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Add the tables of the base class to those of this class."""
        base = cast("type[Body]", cls.__base__)
        cls.accepted = {**base.accepted, **cls.accepted}
        cls.refused = {**base.refused, **cls.refused}


class ModelBody(Body):
    """A body with a model name."""

    model: NonEmpty
    """default: the model that the fleet serves"""

    def opening(self) -> str:
        """Return the text that the requests of a conversation have in common.

        It is ``user`` if the client sends it, or else the first message of the user, or the
        beginning of a prompt or an input.
        """
        return ""


class VectorsBody(ModelBody):
    """A body of a call that returns vectors, or results computed from vectors."""

    pooling: Literal["mean", "last"] = "mean"
    """mean or last"""
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    """recorded in traces and in the request report"""
    priority: Annotated[int, Field(ge=-INT32, lt=INT32)] | None = None
    """requests with lower values run first"""

    accepted: ClassVar[dict[str, str]] = {
        "request_id": "the header X-Request-Id identifies a request",
        "additional_data": "nothing is stored under it",
        "metadata": "nothing is stored under it",
        "mm_processor_kwargs": "applies only to images, which are rejected",
    }


def each(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Return a list of prompts, each as text or as token ids."""
    if isinstance(given, str):
        return [given]
    if all(isinstance(item, int) for item in given):
        return [[item for item in given if isinstance(item, int)]]
    return [item for item in given if not isinstance(item, int)]
