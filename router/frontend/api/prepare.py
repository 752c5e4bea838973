"""Conversion of validated bodies to requests: tokens, resolved sampling, deadline."""

import secrets
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from baton.text.tools import Tool
from baton.types.errors import InvalidRequestError, PromptTooLongError
from baton.types.images import PromptImage
from baton.types.params import SamplingParams
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.completion import MAX_PROMPTS, CompletionBody
from router.frontend.api.bodies.embedding import MAX_INPUTS, EmbeddingBody
from router.frontend.api.bodies.generation import GenerationBody
from router.frontend.api.bodies.rendering import rendering_of
from router.frontend.api.caller import Caller, number_of
from router.frontend.api.formats.prompt_logprobs import check_prompt_logprobs
from router.frontend.api.images import Images, place_images
from router.frontend.api.structured_output import checked_schema
from router.frontend.api.tool_use.offered import messages_of, must_call, offered
from router.process_core import ProcessCore
from router.request import GenerationRequest, Shown, part_id
from router.served_model import ServedModel
from router.sessions.hints import NO_HINTS, Hints, hints_of, is_in_vain
from router.sessions.identity import session_of
from router.sessions.rotating import without_rotating_texts
from router.settings import LaneSettings

_LEAST_TOP_P = 1e-6  # keeps only the likeliest token

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """Grammar of an answer.

    Attributes:
        compiled: llguidance grammar that compiles; empty for none.
        checked_tools: Schemas that complete arguments are checked against, by name of the tool.
    """

    compiled: str = ""
    checked_tools: Mapping[str, str] = field(default_factory=dict)


NO_GRAMMAR = AnswerGrammar()


class Preparer:
    """Converts bodies to requests. Large bodies take time: see ``off_loop``.

    Every method raises InvalidRequestError if a parameter is invalid.
    """

    def __init__(
        self,
        model: ServedModel,
        settings: LaneSettings,
        core: ProcessCore,
        pool_tokens: Callable[[], int | None] = lambda: None,
        images: Images | None = None,
        chain_of: Callable[[GenerationRequest], bytes] = lambda _: b"",
    ) -> None:
        self._model = model
        self._settings = settings
        self._core = core
        self._pool_tokens = pool_tokens
        self._images = images or {}
        self._chain_of = chain_of

    def chat(
        self, body: ChatBody, caller: Caller, now_ns: int, grammar: AnswerGrammar = NO_GRAMMAR
    ) -> GenerationRequest:
        """Return the request of a chat; its answer follows ``grammar``."""
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequestError.at("top_logprobs", "requires logprobs: true")
        limits = (body.max_tokens, body.max_completion_tokens)
        if None not in limits and limits[0] != limits[1]:
            raise InvalidRequestError(
                "max_tokens and max_completion_tokens differ; use one of them", param="max_tokens"
            )
        text, tools = self._rendered(body, caller)
        cut = body.truncate_prompt_tokens
        prompt, images = self._encoded(text, body, caller, whole=cut is None)
        if images and cut is not None:
            raise InvalidRequestError.at("truncate_prompt_tokens", "cannot be combined with images")
        asked_tokens = body.max_completion_tokens or body.max_tokens
        prompt = self._cut(prompt, cut, asked_tokens or 1)
        room = self._room(prompt, "messages")
        alternatives = (body.top_logprobs or 0) if body.logprobs else None
        sampling = self._sampling(
            body,
            asked_tokens,
            room,
            default=self._most_tokens(prompt, room),
            logprobs=alternatives,
            grammar=grammar.compiled,
        )
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=body.prompt_logprobs)
        request = self._request(
            f"chatcmpl-{secrets.token_hex(16)}", body, caller, prompt, sampling, now_ns
        )
        check_prompt_logprobs(body, [request])
        request = self._in_session(replace(request, images=images), body, caller)
        thinking = self._model.thinking_of(text, shown=body.include_reasoning is not False)
        only = must_call(body.tool_choice)
        calls = self._model.tool_syntax.expected(tools, only=only) if tools else None
        return replace(
            request,
            expected_calls=calls,
            thinking=thinking,
            checked_tools=grammar.checked_tools,
            chain=self._chain_of(request),
        )

    def chat_prompt(self, body: ChatBody, caller: Caller) -> Sequence[int]:
        """Return the prompt of a chat, which may exceed the context."""
        text, _ = self._rendered(body, caller)
        prompt, _ = self._encoded(text, body, caller, whole=False)
        return prompt

    def _rendered(self, body: ChatBody, caller: Caller) -> tuple[str, list[Tool]]:
        tools = offered(body.tools, body.tool_choice)
        rendering = rendering_of(body, self._model.template)
        has_images = bool(self._images)
        conversation = messages_of(body.messages, takes_images=has_images)
        if self._core.settings.clients.remove_rotating_texts:
            for name in without_rotating_texts(conversation):
                caller.ignored.leave_out(name, "system")
        return self._model.render_chat(conversation, tools, rendering, has_images), tools

    def _in_session(
        self, request: GenerationRequest, body: ChatBody, caller: Caller
    ) -> GenerationRequest:
        """Return the request with its session, and with the change of the session's prompt."""
        session = session_of(caller.session, body.prompt_cache_key, body.user)
        if not session:
            return request
        key = (request.tenant, request.cache_scope, body.model, session.id)
        change = self._core.session_prompts.note(key, request.hashed)
        return replace(request, session=session, prompt_change=change)

    def _encoded(
        self, text: str, body: ChatBody, caller: Caller, *, whole: bool
    ) -> tuple[Sequence[int], tuple[PromptImage, ...]]:
        scope = self._scope(caller, body.cache_salt)
        prompt = self._model.encode_rendered(
            text, special=bool(body.add_special_tokens), whole=whole, scope=scope
        )
        return place_images(prompt, body, self._images, scope) if self._images else (prompt, ())

    def completions(
        self,
        body: CompletionBody,
        caller: Caller,
        now_ns: int,
        grammar: AnswerGrammar = NO_GRAMMAR,
    ) -> list[GenerationRequest]:
        """Return the requests of a completion, one for each prompt; answers follow ``grammar``."""
        logprobs_only = body.max_tokens == 0
        if logprobs_only and body.prompt_alternatives is None:
            raise InvalidRequestError.at(
                "max_tokens",
                "must be at least 1 (got 0), unless echo and logprobs, or "
                "prompt_logprobs, request log-probabilities of the prompt",
            )
        prompts = body.prompts()
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise InvalidRequestError.at(
                "prompt", f"must contain 1 to {MAX_PROMPTS} prompts (got {len(prompts)})"
            )
        if body.echo and body.truncate_prompt_tokens is not None:
            raise InvalidRequestError.at("echo", "cannot be combined with truncate_prompt_tokens")
        request_id = f"{body.id_prefix}-{secrets.token_hex(16)}"
        requests = []
        for index, text in enumerate(prompts):
            special = body.add_special_tokens is not False
            cut = body.truncate_prompt_tokens
            scope = self._scope(caller, body.cache_salt)
            prompt = self._model.encode_prompt(
                text, special=special, whole=cut is None, scope=scope
            )
            answer_tokens = body.default_tokens if body.max_tokens is None else body.max_tokens
            prompt = self._cut(prompt, cut, answer_tokens)
            # Without an answer the prompt may fill the context: the sampled token is discarded.
            room = self._room(prompt, "prompt", answer_tokens=0 if logprobs_only else 1)
            default = min(body.default_tokens, self._most_tokens(prompt, room))
            asked_tokens = 1 if logprobs_only else body.max_tokens
            sampling = self._sampling(
                body,
                asked_tokens,
                max(room, 1),
                default=default,
                logprobs=body.logprobs,
                grammar=grammar.compiled,
            )
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=body.prompt_alternatives)
            request = self._request(request_id, body, caller, prompt, sampling, now_ns)
            if len(prompts) > 1:
                name = part_id(request_id, index)
                request = replace(request, request_id=name, part_of=request_id)
            request = replace(request, chain=self._chain_of(request))
            requests.append(replace(request, prompt_logprobs_only=logprobs_only))
        check_prompt_logprobs(body, requests)
        return requests

    def embeddings(
        self, body: EmbeddingBody, caller: Caller, now_ns: int
    ) -> list[GenerationRequest]:
        """Return the requests of an embeddings call, one for each input."""
        inputs = body.inputs()
        size = self._model.artifact.config.hidden_size
        if not 1 <= len(inputs) <= MAX_INPUTS:
            raise InvalidRequestError.at(
                "input", f"must contain 1 to {MAX_INPUTS} inputs (got {len(inputs)})"
            )
        if body.dimensions is not None and body.dimensions > size:
            raise InvalidRequestError.at(
                "dimensions",
                f"must be at most {size}, the size of this model's vectors (got {body.dimensions})",
            )
        request_id = f"embd-{secrets.token_hex(16)}"
        requests = []
        for index, text in enumerate(inputs):
            cut = body.truncate_prompt_tokens
            prompt = self._model.encode_prompt(text, param="input", whole=cut is None)
            prompt = self._cut(prompt, cut, answer_tokens=0)
            self._room(prompt, "input", answer_tokens=0)
            name = part_id(request_id, index)
            sampling = SamplingParams(max_tokens=1, temperature=0.0)
            request = self._request(name, body, caller, prompt, sampling, now_ns)
            requests.append(replace(request, part_of=request_id, pooling=body.pooling))
        return requests

    def _cut(self, prompt: Sequence[int], last: int | None, answer_tokens: int) -> Sequence[int]:
        """Apply ``truncate_prompt_tokens``, which keeps the last tokens of a prompt."""
        if last is None:
            return prompt
        if last == 0:
            raise InvalidRequestError.at(
                "truncate_prompt_tokens", "must be -1 or at least 1 (got 0)"
            )
        room = self._model.max_context_tokens - answer_tokens
        return prompt[-(max(room, 1) if last < 0 else last) :]

    def _room(self, prompt: Sequence[int], param: str, answer_tokens: int = 1) -> int:
        limit = self._model.max_context_tokens
        if len(prompt) + answer_tokens > limit:
            raise self._model.too_long(param, str(len(prompt)), limit - answer_tokens)
        return limit - len(prompt)

    def _most_tokens(self, prompt: Sequence[int], room: int) -> int:
        """Return the response tokens that both the context and a worker's KV pool have room for."""
        pool = self._pool_tokens()
        return room if pool is None else min(room, max(1, pool - len(prompt)))

    def _sampling(
        self,
        body: GenerationBody,
        asked_tokens: int | None,
        room: int,
        *,
        default: int,
        logprobs: int | None,
        grammar: str,
    ) -> SamplingParams:
        if asked_tokens is not None and asked_tokens > room:
            raise PromptTooLongError.at(
                "max_tokens",
                f"{asked_tokens} exceeds {room}, the tokens that the prompt leaves; "
                + self._model.context,
            )
        defaults = self._model.artifact.generation_defaults
        most = min(default, max(1, int(defaults.get("max_tokens", default))))
        max_tokens = most if asked_tokens is None else asked_tokens
        self._check(body, max_tokens)
        top_k = _first(body.top_k, defaults.get("top_k"), 0)
        seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=float(_first(body.temperature, defaults.get("temperature"), 1.0)),
            top_p=max(float(_first(body.top_p, defaults.get("top_p"), 1.0)), _LEAST_TOP_P),
            top_k=max(int(top_k), 0),
            min_p=float(_first(body.min_p, defaults.get("min_p"), 0.0)),
            seed=seed,
            n=_first(body.n, 1),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            min_tokens=body.min_tokens or 0,
            logprobs=logprobs,
            logit_bias=tuple((int(name), bias) for name, bias in (body.logit_bias or {}).items()),
            bad_words=self._model.spellings(body.bad_words or ()),
            presence_penalty=float(body.presence_penalty or 0.0),
            frequency_penalty=float(body.frequency_penalty or 0.0),
            repetition_penalty=float(
                _first(body.repetition_penalty, defaults.get("repetition_penalty"), 1.0)
            ),
            grammar=grammar,
        )

    def _check(self, body: GenerationBody, max_tokens: int) -> None:
        """Check limits that depend on the model or on two parameters."""
        vocabulary = self._model.vocab_size
        if body.stream_options is not None and not body.stream:
            raise InvalidRequestError.at("stream_options", "requires stream: true")
        if body.min_tokens is not None and body.min_tokens > max_tokens:
            raise InvalidRequestError.at(
                "min_tokens", f"must be at most {max_tokens}, max_tokens (got {body.min_tokens})"
            )
        if body.top_k is not None and body.top_k > vocabulary:
            raise InvalidRequestError.at(
                "top_k", f"must be at most {vocabulary}, the vocabulary (got {body.top_k})"
            )
        if body.n is not None and body.n > self._settings.window_requests:
            raise InvalidRequestError.at(
                "n",
                f"must be at most {self._settings.window_requests}, the requests that one "
                f"worker runs at once (got {body.n})",
            )
        self._model.check_ids(body.stop_token_ids or (), "stop_token_ids")
        for name in body.logit_bias or ():
            token_id = number_of(name)
            if token_id is None or token_id >= vocabulary:
                raise InvalidRequestError.at(
                    "logit_bias", f"{name[:40]!r} is not a token id (0 to {vocabulary - 1})"
                )

    def _request(
        self,
        request_id: str,
        body: GenerationBody | EmbeddingBody,
        caller: Caller,
        prompt: Sequence[int],
        sampling: SamplingParams,
        now_ns: int,
    ) -> GenerationRequest:
        salt = body.cache_salt if isinstance(body, GenerationBody) else None
        priority = caller.priority if body.priority is None else body.priority
        least = caller.min_priority
        if least is not None and priority < least:
            if body.priority is not None:
                raise InvalidRequestError.at(
                    "priority", f"must be at least {least} for this API key (got {priority})"
                )
            priority = least
        return GenerationRequest(
            request_id=request_id,
            prompt=array("I", prompt),
            sampling=sampling,
            checked_schema=checked_schema(body) if isinstance(body, GenerationBody) else "",
            shown=_shown(body) if isinstance(body, GenerationBody) else Shown(),
            tenant=caller.tenant,
            key_id=caller.key_id,
            routed=caller.routed,
            cache_scope=self._scope(caller, salt),
            adapter=self._model.adapter_of(body.model, caller.tenant, caller.models),
            priority=priority,
            mode=caller.mode,
            user=body.user,
            client_id=caller.client_id,
            arrived_ns=now_ns,
            deadline_ns=now_ns + int(caller.timeout_s * 1e9),
            traceparent=caller.traceparent,
            tracestate=caller.tracestate,
            baggage=caller.baggage,
            slo=caller.limits.at(self._settings.slo),
            flow=caller.flow,
            expected_tokens=body.agent_hints.osl or 0 if isinstance(body, GenerationBody) else 0,
            hints=self._hints(body, caller) if isinstance(body, GenerationBody) else NO_HINTS,
        )

    def _hints(self, body: GenerationBody, caller: Caller) -> Hints:
        tier = body.service_tier
        if is_in_vain("service_tier", tier):
            caller.ignored.leave_out(tier or "", "service_tier")
        retention = body.prompt_cache_retention
        priority = body.agent_hints.priority
        hints = hints_of(retention, tier, priority, final=caller.session_ends)
        share = self._core.settings.clients.pinned_share
        if hints.keep_s and (self._settings.external or not share):
            caller.ignored.leave_out(retention or "", "prompt_cache_retention")
            return hints._replace(kept=False)
        return hints

    def _scope(self, caller: Caller, salt: str | None) -> str:
        """Join owner and salt; unambiguous, because a tenant's name contains no NUL."""
        core = self._core
        owner = core.policies.owner_of(caller.tenant, shared=core.settings.share_cache)
        return f"{owner}\0{salt or ''}"


def _shown(body: GenerationBody) -> Shown:
    return Shown(
        stops=body.stops,
        stop_text=bool(body.include_stop_str_in_output),
        special_tokens=body.skip_special_tokens is False,
        token_ids=bool(body.return_token_ids),
        stop_token=body.shows_stop_token,
    )


def _first(*values: _T | None) -> _T:
    """Return the first value that is not None."""
    for value in values:
        if value is not None:
            return value
    raise ValueError("no default")
