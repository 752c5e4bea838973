"""What all bodies share: the base class, and types with their limits."""

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from router.frontend.api.bodies.fields import Fields

NonEmpty = Annotated[str, StringConstraints(min_length=1)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
INT32 = 2**31
# To list the faults of a million items takes a minute, in which this process does nothing else.
FIRST_FAULT = Field(fail_fast=True)
Choices = Annotated[list[NonEmpty], Field(min_length=1, max_length=4096), FIRST_FAULT]
Ids = Annotated[list[TokenId], FIRST_FAULT]
Prompts = str | Annotated[list[str], FIRST_FAULT] | Ids | Annotated[list[Ids], FIRST_FAULT]
# How many of a prompt's tokens stay, the last ones; -1: as many as leave room for the answer.
Truncation = Annotated[int, Field(ge=-1, lt=INT32)]


class Body(BaseModel):
    """A JSON object of a request.

    Values are converted as pydantic does for JSON: ``"0.5"`` is 0.5, and 5.0 is 5 where a whole
    number is wanted. Ranges are never clamped. What is no field of the class is looked up in
    ``others`` by ``parse``.
    """

    model_config = ConfigDict(
        extra="ignore", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    others: ClassVar[Fields] = Fields()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Add the ``others`` of the class that this one extends."""
        if "others" in cls.__dict__:
            cls.others = cast("type[Body]", cls.__base__).others | cls.others


class ModelBody(Body):
    """A body that says which model answers."""

    model: NonEmpty
    """left out: the model that the fleet serves"""


class VectorsBody(ModelBody):
    """A body that is answered with vectors, or with what is computed from them."""

    pooling: Literal["mean", "last"] = "mean"
    """mean or last"""
    user: Annotated[str, StringConstraints(max_length=512)] | None = None
    """stands in traces and in the request's story"""
    priority: Annotated[int, Field(ge=-INT32, lt=INT32)] | None = None
    """lower goes first"""

    others = Fields(
        accepted={
            "request_id": "the header X-Request-Id names a call",
            "additional_data": "nothing is kept under it",
            "metadata": "nothing is kept under it",
            "mm_processor_kwargs": "of images, which are not taken",
        },
    )


def each(given: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Prompts one by one, each as text or as token ids."""
    if isinstance(given, str):
        return [given]
    if all(isinstance(item, int) for item in given):
        return [[item for item in given if isinstance(item, int)]]
    return [item for item in given if not isinstance(item, int)]
