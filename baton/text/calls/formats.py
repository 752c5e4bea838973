"""Call formats of model families: how models write calls and how the parser reads them.

| family | one call |
|---|---|
| Hermes, Qwen 2.5, Qwen 3 | ``<tool_call>{"name": "f", "arguments": {…}}</tool_call>`` |
| Qwen3-Coder, Qwen 3.5 | ``<function=f><parameter=a>1</parameter></function>`` in ``<tool_call>`` |
| GLM 4.5 and later | ``<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`` |
| Llama 3.1, 3.2, 3.3 | ``{"name": "f", "parameters": {…}}``, with which the response begins |
| Mistral | ``[TOOL_CALLS][{"name": "f", "arguments": {…}}]``, later ``[TOOL_CALLS]f[ARGS]{…}`` |
| DeepSeek V3, R1, V3.1 | ``<｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`` in a list |
| gpt-oss | a message of the commentary channel to ``functions.f`` |

A format is chosen by the text of the chat template.
"""

from collections.abc import Callable
from dataclasses import dataclass

from baton.text.calls.patterns import (
    CALL_ID,
    KEY,
    NAME,
    NAME_STRING,
    OPTIONAL_ID,
    SPACE,
    STRING,
    Part,
    Pattern,
)

Parts = tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Texts around the parts of calls, as the grammar requires them.

    Attributes:
        first: Text before the first call of a list; it begins with a tag.
        begin: Text before a name.
        middle: Text between a name and its arguments.
        end: Text after the arguments.
        between: Text between two calls.
        last: Text after the last call of a list.
        is_list: Whether one pair of ``first`` and ``last`` surrounds several calls.
    """

    first: Parts = ()
    begin: Parts
    middle: Parts
    end: Parts = ()
    between: Parts = ()
    last: Parts = ()
    is_list: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    """Text behind the arguments of a call; it may begin a further call."""

    pattern: Pattern
    begins_call: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Arguments that are written as one tagged value per parameter.

    Attributes:
        begin: Begin of a parameter up to its value.
        end_tag: Tag after a value.
        ends: Ends of a call.
        written: Texts before the key, between key and value, and after the value.
        lines: Whether a new line at both ends of a value is markup.
    """

    begin: Pattern
    end_tag: str
    ends: tuple[Pattern, ...]
    written: tuple[Parts, Parts, Parts]
    lines: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """Format of calls.

    Attributes:
        starts: Begins of a call; one without a name is followed by an object with the name in it.
        bare: Begins of a call with which only a response begins.
        after: Texts behind arguments; behind an object with the name in it: ``after_object``.
        parameters: Tags of the arguments; None if they are one JSON object.
        single: Whether a response has one call, and so has a message of the chat template.
        tags: Tags that may be special tokens of the vocabulary.
        short_ids: Whether the chat template requires ids of nine letters and digits.
        describes: Whether the chat template requires a description of each function.
        in_channels: Whether responses consist of messages in channels.
        prompt: Text that lists the functions where the chat template does not.
        prompt_entry: Entry of one function in it.
    """

    starts: tuple[Pattern, ...]
    bare: tuple[Pattern, ...] = ()
    after: tuple[After, ...] = ()
    after_object: tuple[After, ...] = ()
    parameters: Parameters | None = None
    written: Written
    single: bool = False
    tags: tuple[str, ...] = ()
    short_ids: bool = False
    describes: bool = False
    in_channels: bool = False
    prompt: str = ""
    prompt_entry: str = ""


def _object(*before: Part) -> tuple[Pattern, ...]:
    """Return begins of an object with name and arguments."""
    name = ("{", SPACE, '"name"', SPACE, ":", SPACE, NAME_STRING, SPACE, ",", SPACE)
    typed = ("{", SPACE, '"type"', SPACE, ":", SPACE, '"function"', SPACE, ",", SPACE)
    value = (SPACE, ":", SPACE, "{")
    return tuple(
        Pattern(*before, *head, f'"{key}"', *value, keep=1)
        for head in (name, (*typed, *name[2:]))
        for key in ("arguments", "parameters")
    )


def _any_object(*before: Part) -> tuple[Pattern, ...]:
    """Return begins of an object with name and arguments in any order."""
    return (*_object(*before), Pattern(*before, "{", keep=1))


def _behind_object(after: tuple[After, ...]) -> tuple[After, ...]:
    """Return what follows if the object with the name in it is still open."""
    with_id = (SPACE, ",", SPACE, '"id"', SPACE, ":", SPACE, STRING, SPACE, "}")
    return tuple(
        After(pattern=item.pattern.after(*end), begins_call=item.begins_call)
        for item in after
        for end in ((SPACE, "}"), with_id)
    )


def _calls(*patterns: Pattern) -> tuple[After, ...]:
    return tuple(After(pattern=pattern, begins_call=True) for pattern in patterns)


_HERMES_END = (After(pattern=Pattern(SPACE, "</tool_call>")),)
HERMES = CallFormat(
    starts=_any_object("<tool_call>", SPACE),
    after=_behind_object(_HERMES_END),
    after_object=_HERMES_END,
    written=Written(
        first=(),
        begin=("<tool_call>", SPACE, '{"name": "'),
        middle=('", "arguments": ',),
        end=("}", SPACE, "</tool_call>"),
        between=(SPACE,),
    ),
    tags=("<tool_call>", "</tool_call>"),
)

QWEN_CODER = CallFormat(
    starts=(
        Pattern("<tool_call>", SPACE, "<function=", NAME, ">"),
        Pattern("<function=", NAME, ">"),
    ),
    parameters=Parameters(
        begin=Pattern(SPACE, "<parameter=", KEY, ">"),
        end_tag="</parameter>",
        ends=(
            Pattern(SPACE, "</function>", SPACE, "</tool_call>"),
            Pattern(SPACE, "</function>"),
            Pattern(SPACE, "</tool_call>"),
        ),
        written=(("<parameter=",), (">\n",), ("\n</parameter>\n",)),
        lines=True,
    ),
    written=Written(
        begin=("<tool_call>", SPACE, "<function="),
        middle=(">\n",),
        end=("</function>", SPACE, "</tool_call>"),
        between=(SPACE,),
    ),
    tags=("<tool_call>", "</tool_call>"),
)

GLM = CallFormat(
    starts=(
        Pattern("<tool_call>", SPACE, NAME, SPACE, "<arg_key>", keep=len("<arg_key>")),
        Pattern("<tool_call>", SPACE, NAME, SPACE, "</tool_call>", keep=len("</tool_call>")),
    ),
    parameters=Parameters(
        begin=Pattern(SPACE, "<arg_key>", KEY, "</arg_key>", SPACE, "<arg_value>"),
        end_tag="</arg_value>",
        ends=(Pattern(SPACE, "</tool_call>"),),
        written=(("<arg_key>",), ("</arg_key>", SPACE, "<arg_value>"), ("</arg_value>", SPACE)),
        lines=False,
    ),
    written=Written(
        begin=("<tool_call>",),
        middle=(SPACE,),
        end=("</tool_call>",),
        between=(SPACE,),
    ),
    tags=(
        *("<tool_call>", "</tool_call>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
)

_PYTHON_TAG = "<|python_tag|>"
LLAMA = CallFormat(
    starts=_any_object(_PYTHON_TAG, SPACE),
    bare=_object(SPACE),
    after=_behind_object(
        (
            *_calls(*_object(SPACE, ";", SPACE)),
            After(pattern=Pattern()),
        )
    ),
    written=Written(
        begin=('{"name": "',),
        middle=('", "parameters": ',),
        end=("}",),
    ),
    single=True,
    tags=(_PYTHON_TAG,),
)

_MISTRAL_TAG = "[TOOL_CALLS]"
_LIST_ITEM = (
    *_calls(*_any_object(SPACE, ",", SPACE)),
    After(pattern=Pattern(SPACE, "]")),
)
MISTRAL_LIST = CallFormat(
    starts=_any_object(_MISTRAL_TAG, SPACE, "[", SPACE),
    after=_behind_object(_LIST_ITEM),
    after_object=_LIST_ITEM,
    written=Written(
        first=(_MISTRAL_TAG, SPACE, "["),
        begin=('{"name": "',),
        middle=('", "arguments": ',),
        end=(OPTIONAL_ID, "}"),
        between=(", ",),
        last=("]",),
        is_list=True,
    ),
    tags=(_MISTRAL_TAG,),
    short_ids=True,
)


def _mistral(middle: Parts) -> CallFormat:
    return CallFormat(
        starts=(
            Pattern(_MISTRAL_TAG, NAME, "[ARGS]", SPACE, "{", keep=1),
            Pattern(_MISTRAL_TAG, NAME, "[CALL_ID]", CALL_ID, "[ARGS]", SPACE, "{", keep=1),
        ),
        written=Written(begin=(_MISTRAL_TAG,), middle=middle),
        tags=(_MISTRAL_TAG, "[CALL_ID]", "[ARGS]"),
        short_ids=True,
    )


MISTRAL = _mistral(("[ARGS]",))
MISTRAL_WITH_IDS = _mistral(("[CALL_ID]", CALL_ID, "[ARGS]"))

_CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
_CALLS_END = "<｜tool▁calls▁end｜>"
_CALL_BEGIN = "<｜tool▁call▁begin｜>"
_CALL_END = "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"


def _deepseek(head: Parts, tail: Parts, written: Written, prompt: str) -> CallFormat:
    return CallFormat(
        starts=(
            Pattern(_CALLS_BEGIN, SPACE, _CALL_BEGIN, *head, "{", keep=1),
            Pattern(_CALL_BEGIN, *head, "{", keep=1),
        ),
        after=(
            After(
                pattern=Pattern(*tail, _CALL_END, SPACE, _CALL_BEGIN, *head, "{", keep=1),
                begins_call=True,
            ),
            After(pattern=Pattern(*tail, _CALL_END, SPACE, _CALLS_END)),
            After(pattern=Pattern(*tail, _CALL_END)),
        ),
        written=written,
        tags=(_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END, _SEPARATOR),
        prompt=prompt,
        prompt_entry=_PROMPT_ENTRY,
    )


_PROMPT_ENTRY = "### {name}\nDescription: {description}\n\nParameters: {parameters}\n"


def _prompt(example: str) -> str:
    """Return the text of DeepSeek-V3.1's model card, with the form of a call."""
    return f"""\
## Tools
You have access to the following tools:

{{tools}}

IMPORTANT: ALWAYS adhere to this exact format for tool use:
{_CALLS_BEGIN}{_CALL_BEGIN}{example}{_CALL_END}{{{{additional_tool_calls}}}}{_CALLS_END}

Where:

- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces"""


DEEPSEEK_V31 = _deepseek(
    (SPACE, NAME, _SEPARATOR, SPACE),
    (SPACE,),
    Written(
        first=(_CALLS_BEGIN,),
        begin=(_CALL_BEGIN,),
        middle=(_SEPARATOR,),
        end=(_CALL_END,),
        last=(_CALLS_END,),
        is_list=True,
    ),
    _prompt(f"tool_call_name{_SEPARATOR}tool_call_arguments"),
)
DEEPSEEK = _deepseek(
    (SPACE, "function", _SEPARATOR, NAME, SPACE, "```json", SPACE),
    (SPACE, "```", SPACE),
    Written(
        first=(_CALLS_BEGIN,),
        begin=(_CALL_BEGIN, "function", _SEPARATOR),
        middle=("\n```json\n",),
        end=("\n```", _CALL_END),
        between=("\n",),
        last=(_CALLS_END,),
        is_list=True,
    ),
    _prompt(f"function{_SEPARATOR}tool_call_name\n```json\ntool_call_arguments\n```"),
)

CHANNEL_CALL = "<|channel|>commentary to=functions."
"""Begin of a call's header, as ``baton/text/channels.py`` unifies it."""

GPT_OSS = CallFormat(
    starts=(Pattern(CHANNEL_CALL, NAME, "<|message|>", SPACE, "{", keep=1),),
    written=Written(
        begin=("<|channel|>", "commentary to=functions."),
        middle=(" ", "<|constrain|>", "json", "<|message|>"),
        end=(),
    ),
    single=True,
    tags=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"),
    describes=True,
    in_channels=True,
)

_BY_TEMPLATE: tuple[tuple[Callable[[str], bool], CallFormat], ...] = (
    (lambda text: "<|channel|>commentary" in text, GPT_OSS),
    (lambda text: _SEPARATOR in text and "```json" in text, DEEPSEEK),
    (lambda text: _SEPARATOR in text, DEEPSEEK_V31),
    (lambda text: _MISTRAL_TAG in text and "[CALL_ID]" in text, MISTRAL_WITH_IDS),
    (lambda text: _MISTRAL_TAG in text and "[ARGS]" in text, MISTRAL),
    (lambda text: _MISTRAL_TAG in text, MISTRAL_LIST),
    (lambda text: "<arg_key>" in text, GLM),
    (lambda text: "<tool_call>" in text and "<function=" in text, QWEN_CODER),
    (lambda text: "<tool_call>" in text, HERMES),
    (lambda text: '{"name": function name, "parameters":' in text, LLAMA),
)


def format_of(template: str) -> CallFormat | None:
    """Return the call format that a chat template uses; None if it is not known."""
    return next((found for fits, found in _BY_TEMPLATE if fits(template)), None)
