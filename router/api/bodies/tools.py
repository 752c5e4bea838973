"""The tools that a chat offers, and which of them must be called."""

from typing import Annotated, Any, Literal

from pydantic import Field

from router.api.bodies.common import Body, FunctionName


class FunctionOffered(Body):
    """A function that may be called; ``parameters`` is always kept to, ``strict`` or not."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolOffered(Body):
    """A tool that may be called."""

    type: Literal["function"]
    function: FunctionOffered


class FunctionNamed(Body):
    """A function, by its name."""

    name: FunctionName


class ToolNamed(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionNamed


Tools = Annotated[list[ToolOffered], Field(max_length=128)]
ToolChoice = Literal["none", "auto", "required"] | ToolNamed
