"""Tools that a chat offers, and the choice among them."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from router.frontend.api.bodies.common import FIRST_FAULT, Body, FunctionName, NonEmpty
from router.frontend.api.bodies.fields import MAX_TOOLS


class FunctionOffered(Body):
    """A function that may be called; calls follow ``parameters``, whatever ``strict`` is."""

    name: FunctionName
    """letters, digits and `_-.:/`"""
    description: str | None = None
    """shown to the model"""
    parameters: dict[str, Any] | None = None
    """JSON schema of an object; the arguments of calls follow it"""
    strict: bool | None = None
    """true: a schema that cannot be enforced in full is a 400; otherwise the rest is enforced"""

    accepted: ClassVar[dict[str, str]] = {"cache_control": "prefixes are cached without markers"}


class InputGrammar(Body):
    """Grammar of a custom tool's input."""

    syntax: Literal["lark", "regex"]
    """regex: enforced; lark: shown to the model"""
    definition: NonEmpty
    """text of the grammar"""


class InputFormat(Body):
    """Format of a custom tool's input."""

    type: Literal["text", "grammar"]
    """text, grammar"""
    grammar: InputGrammar | None = None
    """required for type grammar"""


class CustomOffered(Body):
    """A tool whose input is plain text instead of JSON."""

    name: FunctionName
    """letters, digits and `_-.:/`"""
    description: str | None = None
    """shown to the model"""
    format: InputFormat | None = None
    """text, or text that follows a grammar"""


class ToolOffered(Body):
    """A tool that may be called."""

    type: Literal["function", "custom"]
    """function, custom"""
    function: FunctionOffered | None = None
    """the function that may be called; required for type function"""
    custom: CustomOffered | None = None
    """the tool that may be called; required for type custom"""

    accepted: ClassVar[dict[str, str]] = {"cache_control": "prefixes are cached without markers"}


class FunctionNamed(Body):
    """A function, by its name."""

    name: FunctionName


class ToolNamed(Body):
    """The function that must be called."""

    type: Literal["function"] = "function"
    function: FunctionNamed

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.function.name


class CustomNamed(Body):
    """The custom tool that must be called."""

    type: Literal["custom"]
    custom: FunctionNamed

    @property
    def name(self) -> str:
        """Name of the tool."""
        return self.custom.name


class SomeTools(Body):
    """A subset of the offered tools, and whether one of them must be called."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[
        list[ToolNamed | CustomNamed], Field(min_length=1, max_length=MAX_TOOLS), FIRST_FAULT
    ]


class ToolsAllowed(Body):
    """Restriction of calls to some of the tools; the model still sees all tools."""

    type: Literal["allowed_tools"]
    allowed_tools: SomeTools


Tools = Annotated[list[ToolOffered], Field(max_length=MAX_TOOLS), FIRST_FAULT]
ToolChoice = (
    Literal["none", "auto", "required", "any"]
    | Annotated[ToolNamed | CustomNamed | ToolsAllowed, Field(discriminator="type")]
)
