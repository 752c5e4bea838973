"""Tools that a chat offers, and the choice among them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from router.frontend.api.bodies.common import Body, FunctionName
from router.frontend.api.bodies.fields import MAX_TOOLS


class FunctionOffered(Body):
    """A function that may be called; ``parameters`` is always enforced, whatever ``strict`` is."""

    name: FunctionName
    """letters, digits and `_-.:/`"""
    description: str | None = None
    """shown to the model"""
    parameters: dict[str, Any] | None = None
    """JSON schema of an object; the arguments of calls follow it"""
    strict: bool | None = None
    """false: keywords that cannot be enforced during generation are checked afterwards"""

    accepted: ClassVar[dict[str, str]] = {"cache_control": "prefixes are cached without markers"}


class ToolOffered(Body):
    """A tool that may be called."""

    type: Literal["function"]
    """function"""
    function: FunctionOffered
    """the function that may be called"""

    accepted: ClassVar[dict[str, str]] = {"cache_control": "prefixes are cached without markers"}


class FunctionNamed(Body):
    """A function, by its name."""

    name: FunctionName


class ToolNamed(Body):
    """The tool that must be called."""

    type: Literal["function"] = "function"
    function: FunctionNamed


class SomeTools(Body):
    """A subset of the offered tools, and whether one of them must be called."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ToolNamed], Field(min_length=1, max_length=MAX_TOOLS)]


class ToolsAllowed(Body):
    """Restriction of calls to some of the tools; the model still sees all tools."""

    type: Literal["allowed_tools"]
    allowed_tools: SomeTools


Tools = Annotated[list[ToolOffered], Field(max_length=MAX_TOOLS)]
ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[ToolNamed | ToolsAllowed, Field(discriminator="type")]
)
