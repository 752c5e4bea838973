"""Served model without weights: names, tokenizer, chat template, limits."""

import logging
from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from baton.folders import read_small
from baton.model.artifact import ModelArtifact, resolve_model
from baton.text.grammar import Vocabulary, vocabulary_of
from baton.text.length_bound import LengthBound
from baton.text.reasoning import ReasoningSyntax, Thinking
from baton.text.template import ChatTemplate, Rendering, joined_turns, special_tokens_of
from baton.text.tokenizer import TextTokenizer, load_tokenizer
from baton.text.tools import Tool, ToolSyntax, conversation
from baton.types.errors import InvalidRequestError, ModelNotFoundError, PromptTooLongError
from baton.types.params import AdapterRef
from router.adapter_table import AdapterTable
from router.settings import LaneSettings

_LOG = logging.getLogger(__name__)
_CUT_CHARACTERS = 2**19  # of any text that is cut, which takes a third of a second
_CUT_CHARACTERS_PER_TOKEN = 16  # of the context, if that is more
_SLICE_IDS = 65_536


class ServedModel:
    """Names, tokenizer, chat template and limits of the served model.

    Args:
        artifact: Metadata of the model's files.
        names: Served name, then its aliases.
        max_context_tokens: Limit of prompt and answer together; at most the model's own.
        emulated: Whether workers are emulated, or attached servers with a limit of their own; for
            both the limit of the model's files does not apply.
        chat_template: Jinja text that replaces the model's own template.
        adapters: LoRA adapters; by default an empty table into which any may be loaded.

    Raises:
        ValueError: The limit exceeds the model's, or tokenizer or template cannot be used.
    """

    def __init__(
        self,
        artifact: ModelArtifact,
        names: Sequence[str],
        *,
        max_context_tokens: int | None = None,
        emulated: bool = False,
        chat_template: str | None = None,
        adapters: AdapterTable | None = None,
    ) -> None:
        limit = artifact.config.max_context_tokens
        if not emulated and max_context_tokens is not None and max_context_tokens > limit:
            raise ValueError(
                f"max_context_tokens: {max_context_tokens} exceeds {limit}, the model's context"
            )
        _ = artifact.weights_digest  # reads the weights, so not during a request
        self.artifact = artifact
        self.names = tuple(names)
        self.adapters = adapters or AdapterTable(artifact.config, self.names)
        self.max_context_tokens = max_context_tokens or limit
        self.tokenizer: TextTokenizer = load_tokenizer(artifact.tokenizer)
        self.vocab_size = artifact.config.vocab_size
        source = chat_template or artifact.chat_template
        with_tools = None if chat_template else artifact.tool_template
        self.tool_syntax = ToolSyntax.of(with_tools or source, self.tokenizer)
        self.reasoning = ReasoningSyntax.of(source, self.tokenizer)
        special = special_tokens_of(artifact, self.tokenizer.token_text)
        self.template = ChatTemplate(source, special, with_tools)
        self._alternates = self.template.requires_alternation()
        self.takes_images = False
        self._warn_of_unknown_ids()

    @classmethod
    def load(cls, settings: LaneSettings) -> "ServedModel":
        """Load the model of the settings from files. Blocks."""
        template = settings.chat_template
        artifact = resolve_model(
            settings.model,
            allow_unsupported=bool(settings.external),
            with_weights=not settings.attached,
        )
        adapters = AdapterTable(
            artifact.config,
            (*settings.model_names, *settings.other_models),
            settings.adapters,
            settings.max_adapters,
            settings.max_adapter_rank,
            settings.adapter_folder,
        )
        served = cls(
            artifact,
            settings.model_names,
            adapters=adapters,
            max_context_tokens=settings.max_context_tokens,
            emulated=bool(settings.emulated) or settings.attached,
            chat_template=read_small(template).decode() if template else None,
        )
        served.takes_images = settings.external == "vllm" and served.template.takes_images
        return served

    def serves(
        self, name: str, tenant: str | None = None, allowed: Sequence[str] | None = None
    ) -> bool:
        """Return whether a tenant (None: any) may use this model or adapter.

        ``allowed`` has the names that the tenant may use; None: all.
        """
        is_served = name in self.names or self.adapters.find(name, tenant) is not None
        return is_served and (allowed is None or name in allowed)

    def own_name(self, name: str) -> str:
        """Return the served name for an alias of the model; an adapter keeps its name."""
        return self.names[0] if name in self.names else name

    def served_names(
        self, tenant: str | None = None, allowed: Sequence[str] | None = None
    ) -> list[str]:
        """Return the names that `serves` accepts: the model's, then its adapters'."""
        names = [*self.names, *(entry.name for entry in self.adapters.served(tenant))]
        return [name for name in names if allowed is None or name in allowed]

    def adapter_of(
        self, name: str, tenant: str | None = None, allowed: Sequence[str] | None = None
    ) -> AdapterRef | None:
        """Return the adapter with this model name; None for the base model.

        Raises ModelNotFoundError if `serves` does not accept the name.
        """
        if not self.serves(name, tenant, allowed):
            raise not_served(name, self.served_names(tenant, allowed))
        entry = self.adapters.find(name, tenant)
        return None if entry is None else entry.ref()

    @property
    def version(self) -> str:
        """Digest of the weights, shortened."""
        return self.artifact.weights_digest.hex()[:12]

    def version_of(self, name: str) -> str:
        """Return the version of the model or of an adapter: the shortened digest of its weights."""
        entry = None if name in self.names else self.adapters.find(name)
        return self.version if entry is None else entry.digest[:12]

    def encode_prompt(
        self,
        prompt: str | Sequence[int],
        *,
        special: bool = True,
        param: str = "prompt",
        whole: bool = True,
        scope: str | None = None,
    ) -> Sequence[int]:
        """Return the token ids of a prompt.

        Args:
            prompt: Text or token ids.
            special: Whether the tokenizer adds its special tokens.
            param: Name of the field in errors.
            whole: Whether the prompt must fit the context, because it is neither cut nor only
                counted.
            scope: Only prompts of the same scope share cached parts of the text; None: none do.

        Raises:
            PromptTooLongError: The text is too long; see `check_length`.
            InvalidRequestError: The prompt is empty, or an id is outside the vocabulary, which
                may be smaller than the tokenizer's.
        """
        tokens: Sequence[int]
        if isinstance(prompt, str):
            self.check_length(prompt, param, whole=whole)
            if scope is None:
                tokens = self.tokenizer.encode(prompt, add_special_tokens=special)
            else:
                tokens = self.tokenizer.encode_again(prompt, scope, add_special_tokens=special)
        else:
            tokens = list(prompt)
        self.check_ids(tokens, param)
        if not tokens:
            raise InvalidRequestError.at(param, "must not be empty")
        return tokens

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Tool] = (),
        rendering: Rendering = Rendering(),  # noqa: B008 - it is frozen
        images: bool = False,
    ) -> str:
        """Render a conversation with the chat template.

        Messages and tools are in the form of ``baton.text.tools.conversation``, with a mark in
        place of each image if there are ``images``.

        Raises:
            InvalidRequestError: The model has no template, or the template raises an error.
        """
        adapted, listed = conversation(messages, tools, self.tool_syntax)
        if self._alternates:
            adapted = joined_turns(adapted)
        return self.template.render(adapted, tools=listed, rendering=rendering, images=images)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Tool] = (),
        rendering: Rendering = Rendering(),  # noqa: B008 - it is frozen
    ) -> list[int]:
        """Return the token ids of a conversation; see `render_chat`."""
        return list(self.encode_rendered(self.render_chat(messages, tools, rendering)))

    def thinking_of(self, prompt: str, *, shown: bool) -> Thinking | None:
        """Return the thinking of the answer to a rendered prompt; None if the model has none."""
        if self.reasoning is None:
            return None
        return Thinking(self.reasoning, self.reasoning.begun_by(prompt), shown)

    def thought_grammar(self, rendering: Rendering, budget: int | None) -> str:
        """Return a Lark grammar of the thinking before an answer; empty if there is none.

        Args:
            rendering: Options of the template, which determine whether the prompt starts thinking.
            budget: Maximum number of thinking tokens.

        Raises:
            InvalidRequestError: The model's thinking cannot be limited.
        """
        if self.reasoning is None or not rendering.begin_answer or not self.template.exists:
            return ""
        prompt = self.template.render([{"role": "user", "content": "hi"}], rendering=rendering)
        if self.reasoning.closed_by(prompt):
            return ""
        ends = self.artifact.config.eos_token_ids
        begun = self.reasoning.begun_by(prompt)
        return self.reasoning.grammar(begun=begun, end_ids=ends, budget=budget)

    def encode_rendered(
        self, text: str, *, special: bool = False, whole: bool = True, scope: str = ""
    ) -> Sequence[int]:
        """Return the token ids of a rendered chat, whose text already contains a BOS token.

        Only chats of the same ``scope`` share cached parts of the text. The other arguments and
        the errors are those of `encode_prompt`.
        """
        self.check_length(text, "messages", whole=whole)
        tokens = self.tokenizer.encode_again(text, scope, add_special_tokens=special)
        self.check_ids(tokens, "messages")
        if not tokens:
            raise InvalidRequestError.at("messages", "the chat template returned an empty prompt")
        return tokens

    def spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of ``bad_words``, at the start of a text and after a space."""
        texts = [text for word in words for text in (word, f" {word.lstrip()}")]
        spelled = dict.fromkeys(tuple(ids) for ids in map(self.tokenizer.encode, texts) if ids)
        for ids in spelled:
            self.check_ids(ids, "bad_words")
        return tuple(spelled)

    def speed_up(self) -> None:
        """Make long texts faster from now on. It takes a second or more. Thread-safe."""
        _ = self._length_bound  # otherwise the first long text waits for it
        self.tokenizer.speed_up(self.template.source)

    @property
    def context(self) -> str:
        """Part of errors that clients know from vLLM."""
        return f"this model's maximum context length is {self.max_context_tokens} tokens"

    def too_long(self, param: str, tokens: str, most: int) -> PromptTooLongError:
        """Return the error of a prompt, whose first words and figures clients know of Anthropic."""
        text = f"the prompt is too long: {tokens} tokens > {most}; {self.context}"
        return PromptTooLongError.at(param, f"{text} for prompt and answer together")

    @cached_property
    def _length_bound(self) -> LengthBound:
        return LengthBound.of(self.tokenizer)

    def check_length(self, text: str, param: str, *, whole: bool = True) -> None:
        """Reject a text that is too long for the context without tokenizing it.

        A text that is not used ``whole`` is limited in characters, because it is tokenized to its
        end: without either end, tokens at the other one may differ.
        """
        limit = self.max_context_tokens
        if not whole:
            most = max(_CUT_CHARACTERS, _CUT_CHARACTERS_PER_TOKEN * limit)
            if len(text) > most:
                raise PromptTooLongError.at(
                    param,
                    f"a text of {len(text)} characters is too long to be cut or counted; the "
                    f"limit is {most} characters",
                )
            return
        if len(text) <= limit or not self._length_bound.may_exceed(len(text), limit):
            return
        if (least := self._length_bound.fewest_tokens(text)) > limit:
            raise self.too_long(param, f"at least {least}", limit)

    def vocabulary(self) -> Vocabulary:
        """Return the vocabulary for grammars, which takes a moment."""
        ends = self.artifact.config.eos_token_ids
        return vocabulary_of(self.tokenizer, self.vocab_size, ends)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Reject token ids outside the vocabulary, from clients or from the tokenizer."""
        if isinstance(ids, array):
            largest = int(np.frombuffer(ids, np.uint32).max(initial=0))
        else:  # in slices, because one call for millions of ids would hold the interpreter
            slices = (ids[begin : begin + _SLICE_IDS] for begin in range(0, len(ids), _SLICE_IDS))
            largest = max(map(max, slices), default=0)
        if largest >= self.vocab_size:
            text = self.tokenizer.token_text(largest)
            raise InvalidRequestError.at(
                param,
                f"token id {largest}{f' ({text[:80]!r})' if text else ''} is outside the model's "
                f"vocabulary (0 to {self.vocab_size - 1})",
            )

    def _warn_of_unknown_ids(self) -> None:
        """Log tokens of the tokenizer that the model cannot read."""
        unknown = self.tokenizer.texts_from(self.vocab_size)
        if unknown:
            shown = ", ".join(f"{text!r} = {token_id}" for token_id, text in unknown[:8])
            _LOG.warning(
                "the tokenizer has %d tokens outside the model's vocabulary of %d; texts with "
                "them are refused: %s",
                len(unknown),
                self.vocab_size,
                shown,
            )

    def record(self, name: str, created: int, dtype: str = "") -> dict[str, Any]:
        """Return the artifact record for ``GET /v1/models/{id}``."""
        artifact = self.artifact
        entry = self.adapters.find(name)
        if entry is not None:
            return {
                "id": name,
                "object": "model",
                "created": entry.changed_ms // 1000 or created,
                "owned_by": entry.owner or "baton",
                "root": entry.path,
                "parent": self.names[0],
                "max_model_len": self.max_context_tokens,
                "adapter_digest": entry.digest,
                "rank": entry.rank,
                "target_modules": list(entry.targets),
            }
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "baton",
            "root": self.names[0],
            "max_model_len": self.max_context_tokens,
            "source": artifact.source,
            "format": artifact.format,
            "revision": artifact.revision,
            "license": artifact.license,
            "architecture": artifact.architecture,
            "context_tokens": artifact.config.max_context_tokens,
            "vocab_size": artifact.config.vocab_size,
            "dtype": dtype,
            "quantisation": artifact.quantisation,
            "weights_digest": artifact.weights_digest.hex(),
            "tokenizer_digest": artifact.tokenizer_digest.hex(),
            "template_digest": artifact.template_digest.hex(),
            "generation_defaults": dict(artifact.generation_defaults),
        }


def not_served(name: str, served: Sequence[str], shown: int = 1) -> ModelNotFoundError:
    """Return the error for a name that is not served, which shows so many that are."""
    usable = [other for other in served if other != name][:shown]
    hint = f"; this fleet serves {', '.join(map(repr, usable))}" if usable else ""
    return ModelNotFoundError.at("model", f"{name[:200]!r} is not served{hint}")
