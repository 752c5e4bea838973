"""Rendering of a model's chat template, in a sandbox with a budget.

Templates come with the model, so they are untrusted code: no access to Python's internals, no
mutation of values, limits of time and of output size.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from time import monotonic, thread_time
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from baton.model.artifact import ModelArtifact
from baton.types.errors import InvalidRequestError

_MAX_CHARACTERS = 16 * 1024 * 1024
_MAX_SECONDS = 2.0
_UNMEASURED_S = 0.02
_MAX_JSON_CHARACTERS = 64  # between two values of JSON
_PROBE = "probe"

IMAGE_MARK = "\ufdd0"
"""Character that stands for an image in the content of a message."""


class _BudgetError(TemplateError):
    """The template exceeds its budget of time or size."""


class _Clock:
    """Time that a template may take: of this thread's CPU, since a busy host stops threads.

    Most take less than a millisecond. The CPU's time, whose reading may let others run, begins to
    count after some of them.
    """

    def __init__(self) -> None:
        self._end_s = 0.0
        self._next_s = monotonic() + _UNMEASURED_S

    def check(self) -> None:
        if monotonic() > self._next_s:
            now_s = thread_time()
            self._end_s = self._end_s or now_s + _MAX_SECONDS
            left_s = self._end_s - now_s
            if left_s <= 0:
                raise _BudgetError(f"it ran for more than {_MAX_SECONDS} s")
            self._next_s = monotonic() + left_s


class _Generation(Extension):
    """Tag around the model's own texts, which marks them for training and outputs them."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """Sandbox that checks the time limit at every call and lookup."""

    # One product of a string and a number could take all memory between two checks.
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        extensions = [loopcontrols, _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self.clock: ContextVar[_Clock] = ContextVar("clock")
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)

    def check_time(self) -> None:
        self.clock.get().check()

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        are_numbers = isinstance(left, int | float) and isinstance(right, int | float)
        size = len(left) if isinstance(left, str | list | tuple) else 1
        times = right if isinstance(right, int) else 1
        power = operator == "**" and not (are_numbers and abs(left) < 1 << 32 and abs(right) < 99)
        if power or (not are_numbers and size * times > _MAX_CHARACTERS):
            raise _BudgetError(f"the result of {operator!r} would be too large")
        return super().call_binop(context, operator, left, right)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self.check_time()
        return super().call(*args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_time()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_time()
        return super().getitem(obj, argument)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON with the options of transformers. Jinja's own filter escapes HTML."""
    texts = [text for text in (*(separators or ()), indent) if isinstance(text, str)]
    width = indent if isinstance(indent, int) else 0
    if max(width, *map(len, texts), 0) > _MAX_JSON_CHARACTERS:
        raise _BudgetError(f"tojson: more than {_MAX_JSON_CHARACTERS} characters between values")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """Options of rendering a conversation.

    Attributes:
        values: Further template variables, such as ``enable_thinking``.
        begin_answer: Whether to end with the beginning of a response.
        go_on: Whether to end within the last message, which the response continues.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    begin_answer: bool = True
    go_on: bool = False


class ChatTemplate:
    """Compiled chat template; raises ``ValueError`` if the template does not compile.

    Args:
        source: Jinja text, or None for a model without one.
        special_tokens: Template variables such as ``bos_token``.
        with_tools: Jinja text for requests with tools, if the model has one.

    Attributes:
        takes_images: Whether it has a place for images in messages of users.
    """

    def __init__(
        self,
        source: str | None,
        special_tokens: Mapping[str, str] | None = None,
        with_tools: str | None = None,
    ) -> None:
        self.source = source or ""
        self._special_tokens = dict(special_tokens or {})
        self._environment = _Environment()
        self._template = self._compiled(source)
        self._with_tools = self._compiled(with_tools) or self._template
        self._only_parts = False  # texts that are no list of parts are not shown
        self.takes_images = False
        if not self.knows("image"):  # most templates are not rendered here, which takes time
            return
        text = self._probed(_PROBE) or ""
        in_parts = self._probed([{"type": "text", "text": _PROBE}]) or ""
        self._only_parts = _PROBE not in text and _PROBE in in_parts
        with_image = self._probed([{"type": "image"}, {"type": "text", "text": _PROBE}]) or ""
        knows_parts = self._only_parts or (in_parts == text and text != "")
        self.takes_images = knows_parts and with_image not in ("", in_parts)

    def _probed(self, *contents: object) -> str | None:
        """Return the text of a user's messages; None if the template rejects them."""
        try:
            return self.render([{"role": "user", "content": content} for content in contents])
        except InvalidRequestError:
            return None

    def _compiled(self, source: str | None) -> Template | None:
        try:
            return None if source is None else self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template does not compile: line {error.lineno}: {error}"
            ) from error

    @property
    def exists(self) -> bool:
        """Return whether the model has a template."""
        return self._template is not None

    def knows(self, word: str) -> bool:
        """Return whether the template contains ``word``, the name of a variable or a role."""
        return word in self.source

    def requires_alternation(self) -> bool:
        """Return whether the template rejects two messages of one role in a row."""
        return self._probed(_PROBE) is not None and self._probed(_PROBE, _PROBE) is None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        rendering: Rendering = Rendering(),
        images: bool = False,
    ) -> str:
        """Render the prompt of a conversation, with ``images`` in place of their marks.

        Raises:
            InvalidRequestError: There is no template, it rejected the messages, or it exceeded its
                budget of time or size.
        """
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template; "
                "use /v1/completions, or set `chat_template` in the fleet's configuration",
                param="messages",
            )
        values = {
            **self._special_tokens,
            "documents": None,  # defined in transformers
            **rendering.values,
            "messages": [self._for_template(message, images) for message in messages],
            "tools": list(tools) or None,
            "add_generation_prompt": rendering.begin_answer,
        }
        try:
            called = any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
            text = self._write(self._with_tools if tools or called else self._template, values)
        except (TemplateError, TypeError, ValueError, OverflowError) as error:
            raise InvalidRequestError(
                f"the model's chat template rejected these messages: {error}", param="messages"
            ) from error
        return _up_to_content(text, str(messages[-1]["content"])) if rendering.go_on else text

    def _for_template(self, message: Mapping[str, Any], images: bool) -> Mapping[str, Any]:
        if message["role"] == "developer" and not self.knows("developer"):
            message = {**message, "role": "system"}
        content = message["content"]
        if not isinstance(content, str) or not (
            self._only_parts or (images and IMAGE_MARK in content)
        ):
            return message
        parts: list[dict[str, str]] = []
        for number, text in enumerate(content.split(IMAGE_MARK) if images else [content]):
            parts += [{"type": "image"}] if number else []
            parts += [{"type": "text", "text": text}] if text else []
        return {**message, "content": parts}

    def _write(self, template: Template | None, values: Mapping[str, Any]) -> str:
        if template is None:
            raise TemplateError("there is no template")
        environment = self._environment
        token = environment.clock.set(_Clock())
        pieces: list[str] = []
        size = 0
        try:
            for piece in template.generate(values):
                environment.check_time()
                size += len(piece)
                if size > _MAX_CHARACTERS:
                    raise _BudgetError(f"it wrote more than {_MAX_CHARACTERS} characters")
                pieces.append(piece)
        finally:
            environment.clock.reset(token)
        return "".join(pieces)


def joined_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with texts of one role in a row as one message, joined by line breaks."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if _is_text(last) and _is_text(message) and last["role"] == message["role"]:
            joined[-1] = {**last, "content": f"{last['content']}\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def _is_text(message: Mapping[str, Any]) -> bool:
    return message.keys() == {"role", "content"} and isinstance(message["content"], str)


def _up_to_content(text: str, content: str) -> str:
    """Return ``text`` up to the end of its last message, which has this content."""
    core = content.strip()
    at = text.rfind(core)
    if not core or at < 0:
        raise InvalidRequestError(
            "continue_final_message: the chat template changes the content of the last message, so "
            "it cannot be continued",
            param="continue_final_message",
        )
    tail = content.lstrip()  # some templates strip the content
    return text[: at + len(tail)] if text.startswith(tail, at) else text[: at + len(core)]


def special_tokens_of(artifact: ModelArtifact, spell: Callable[[int], str]) -> dict[str, str]:
    """Return template variables with the texts of the special tokens.

    The ids of the configuration count only where the tokenizer's own files have no entry.
    """
    named = {"bos_token": artifact.config.bos_token_id}
    named["eos_token"] = next(iter(artifact.config.eos_token_ids), None)
    texts = {name: spell(token_id) for name, token_id in named.items() if token_id is not None}
    return {**texts, **artifact.special_tokens}
