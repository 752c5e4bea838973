"""The model that the fleet serves, as the router knows it: names, text, limits. No weights."""

import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from baton.model.artifact import ModelArtifact, resolve_model
from baton.text.grammar import Vocabulary, vocabulary_of
from baton.text.length_bound import LengthBound
from baton.text.reasoning import ReasoningSyntax, Thinking
from baton.text.template import ChatTemplate, Rendering, special_tokens_of
from baton.text.tokenizer import TextTokenizer, load_tokenizer
from baton.text.tools import Tool, conversation, syntax_of
from baton.types.errors import InvalidRequestError, ModelNotFoundError, PromptTooLongError
from baton.types.params import AdapterRef
from router.adapter_table import AdapterTable
from router.settings import RouterSettings


class ServedModel:
    """Names, tokenizer and chat template.

    Args:
        artifact: What the weights files say.
        names: The served name, then its aliases.
        max_context_tokens: Prompt and answer together; at most the model's own limit.
        emulated: The workers have no weights, so the model's limit does not bind them.
        chat_template: Jinja text that replaces the model's own.
        adapters: LoRA adapters that may be named beside the model; by default none, and any may
            be loaded.

    Raises:
        ValueError: The limit is beyond the model's, or tokenizer or template cannot be used.
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
                f"max_context_tokens = {max_context_tokens}: the model has only {limit}"
            )
        self.artifact = artifact
        self.names = tuple(names)
        self.adapters = adapters or AdapterTable(artifact.config, self.names)
        self.max_context_tokens = max_context_tokens or limit
        self.tokenizer: TextTokenizer = load_tokenizer(artifact.tokenizer_source())
        config = artifact.config
        self.vocab_size = config.vocab_size
        eos = config.eos_token_ids[0] if config.eos_token_ids else None
        source = chat_template or artifact.chat_template
        self.tool_syntax = syntax_of(source)
        self.reasoning = ReasoningSyntax.of(source, self.tokenizer)
        self.template = ChatTemplate(
            source,
            special_tokens_of(self.tokenizer.token_text, bos=config.bos_token_id, eos=eos),
        )

    @classmethod
    def load(cls, settings: RouterSettings) -> "ServedModel":
        """The model of the settings; reads files, so not for the event loop."""
        template = settings.chat_template
        artifact = resolve_model(settings.model)
        adapters = AdapterTable(
            artifact.config,
            settings.model_names,
            settings.adapters,
            settings.max_adapters,
            settings.max_adapter_rank,
            settings.adapter_folder,
        )
        model = cls(
            artifact,
            settings.model_names,
            adapters=adapters,
            max_context_tokens=settings.max_context_tokens,
            emulated=bool(settings.emulated),
            chat_template=Path(template).read_text("utf-8") if template else None,
        )
        # Requests do not wait for it: until it is there they are encoded more slowly.
        threading.Thread(target=model.tokenizer.speed_up, name="tokenizer", daemon=True).start()
        return model

    def check_name(self, name: str, tenant: str | None = None) -> str:
        """Return ``name`` if the fleet serves it.

        Args:
            name: Of the model or of an adapter.
            tenant: For whom; None: adapters of every tenant count.

        Raises:
            ModelNotFoundError: It does not; the message says what it serves.
        """
        if name not in self.names and self.adapters.find(name, tenant) is None:
            raise ModelNotFoundError(
                f"model {name[:200]!r} is not served here; this fleet serves {self.names[0]!r}",
                param="model",
            )
        return name

    def adapter_of(self, name: str, tenant: str | None = None) -> AdapterRef | None:
        """The adapter that a model name stands for; None for the model itself.

        Args:
            name: Of the model or of an adapter.
            tenant: For whom; None: adapters of every tenant count.

        Raises:
            ModelNotFoundError: The fleet does not serve the name (any more).
        """
        entry = self.adapters.find(self.check_name(name, tenant), tenant)
        return None if entry is None else entry.ref()

    @property
    def hidden_size(self) -> int:
        """Length of a hidden state, and so of an embedding."""
        return self.artifact.config.hidden_size

    def encode_prompt(
        self,
        prompt: str | Sequence[int],
        *,
        special: bool = True,
        param: str = "prompt",
        whole: bool = True,
    ) -> list[int]:
        """Token ids of a completion's prompt, or of another text that ``param`` names.

        Args:
            prompt: A text or token ids.
            special: The tokenizer adds its own.
            param: For errors.
            whole: The prompt will not be cut to fit the context.

        Raises:
            PromptTooLongError: It has so many characters that it cannot fit the context.
            InvalidRequestError: It is empty, or an id is outside the vocabulary.
        """
        if isinstance(prompt, str):
            if whole:
                self.check_length(prompt, param)
            tokens = self.tokenizer.encode(prompt, add_special_tokens=special)
        else:
            tokens = list(prompt)
            self.check_ids(tokens, param)
        if not tokens:
            raise InvalidRequestError(f"{param}: must not be empty", param=param)
        return tokens

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Tool] = (),
        rendering: Rendering = Rendering(),  # noqa: B008 - it is frozen
    ) -> str:
        """The text of a conversation, by the model's template.

        Messages and tools are those of ``baton.text.tools.conversation``.

        Raises:
            InvalidRequestError: The model has no template, or the template refuses.
        """
        told, listed = conversation(messages, tools, self.tool_syntax)
        return self.template.render(told, tools=listed, rendering=rendering)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Tool] = (),
        rendering: Rendering = Rendering(),  # noqa: B008 - it is frozen
    ) -> list[int]:
        """Token ids of a conversation, see `render_chat`."""
        return self.encode_rendered(self.render_chat(messages, tools, rendering))

    def thinking_of(self, prompt: str, *, shown: bool) -> Thinking | None:
        """How the answer to a rendered prompt thinks; None for a model that does not."""
        if self.reasoning is None:
            return None
        return Thinking(self.reasoning, self.reasoning.begun_by(prompt), shown)

    def thought_grammar(self, rendering: Rendering, budget: int | None) -> str:
        """A Lark grammar of the thinking at the begin of an answer; empty if there is none.

        Args:
            rendering: How the prompt is written; whether it begins the thinking does not depend
                on the conversation.
            budget: Tokens of thinking, at most.

        Raises:
            InvalidRequestError: The model's thinking cannot be cut.
        """
        if self.reasoning is None or not rendering.begin_answer or not self.template.exists:
            return ""
        prompt = self.template.render([{"role": "user", "content": "hi"}], rendering=rendering)
        if self.reasoning.closed_by(prompt):
            return ""
        ends = self.artifact.config.eos_token_ids
        begun = self.reasoning.begun_by(prompt)
        return self.reasoning.grammar(begun=begun, end_ids=ends, budget=budget)

    def encode_rendered(self, text: str, *, special: bool = False, whole: bool = True) -> list[int]:
        """Token ids of what the template wrote (which has its own BOS token in it).

        Args:
            text: The prompt.
            special: The tokenizer adds its own.
            whole: The prompt will not be cut to fit the context.

        Raises:
            PromptTooLongError: It has so many characters that it cannot fit the context.
            InvalidRequestError: It is empty.
        """
        if whole:
            self.check_length(text, "messages")
        tokens = self.tokenizer.encode(text, add_special_tokens=special)
        if not tokens:
            raise InvalidRequestError("the chat template made an empty prompt", param="messages")
        return tokens

    def spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """How the tokenizer writes words: at the start of a text, and behind a space."""
        texts = [text for word in words for text in (word, f" {word.lstrip()}")]
        return tuple(dict.fromkeys(tuple(ids) for ids in map(self.tokenizer.encode, texts) if ids))

    def know_lengths(self) -> None:
        """Look at all tokens for `check_length`; takes a moment."""
        _ = self._length_bound

    @cached_property
    def _length_bound(self) -> LengthBound:
        return LengthBound.of(self.tokenizer)

    def check_length(self, text: str, param: str) -> None:
        """Refuse a text that cannot fit, before the time that tokenizing it would take."""
        limit = self.max_context_tokens
        if len(text) > limit and (least := self._length_bound.fewest_tokens(text)) > limit:
            raise PromptTooLongError(
                f"{param}: a text of {len(text)} characters has at least {least} tokens; this "
                f"model's context is {limit} tokens, prompt and answer together",
                param=param,
            )

    def vocabulary(self) -> Vocabulary:
        """The tokens, for grammars; takes a moment."""
        ends = self.artifact.config.eos_token_ids
        return vocabulary_of(self.tokenizer, self.vocab_size, ends)

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Refuse token ids outside the vocabulary.

        Raises:
            InvalidRequestError: Names the id and the limit.
        """
        for token_id in ids:
            if token_id >= self.vocab_size:
                raise InvalidRequestError(
                    f"{param}: token id {token_id} is outside the vocabulary "
                    f"(0 to {self.vocab_size - 1})",
                    param=param,
                )

    def record(self, name: str, created: int, dtype: str = "") -> dict[str, Any]:
        """The artifact record of ``GET /v1/models/{id}``; an adapter's names its parent."""
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
