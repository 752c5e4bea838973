"""Formats of OpenAI's chat and text completions, and vLLM's of token ids, whole and as chunks."""

from collections.abc import Collection, Sequence
from typing import Any, ClassVar, NamedTuple

from baton.text.tokenizer import TextTokenizer
from baton.types.errors import BatonError
from router.frontend.api.formats.answer_format import (
    DONE,
    KEEP_ALIVE_COMMENT,
    AnswerFormat,
    TextEvent,
    data_event,
    usage,
)
from router.frontend.api.formats.prompt_logprobs import (
    PromptView,
    shown_logprob,
    token_key,
    top_by_key,
)
from router.frontend.api.tool_use.custom import ChatCalls, ShownCall
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.choice import Delta, ShownLogprob

_NO_LOGPROB = -9999.0  # vLLM's value for tokens without one, such as those that end an answer


class AnswerHead(NamedTuple):
    """Fields with which a response and each of its chunks begin; ``created`` is in Unix seconds."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class _Format(AnswerFormat):
    """Common part of the formats. Each chunk of a stream is an event, and ``[DONE]`` is its end.

    Args:
        include_usage: Whether chunks have a ``usage`` field, and the last one the usage.
        continuous_usage: Whether every chunk contains the usage so far.
        prompt_logprobs: Number of alternatives for each prompt token (vLLM's parameter).
        token_ids: Whether the response contains token ids (vLLM's ``return_token_ids``).
    """

    keep_alive = KEEP_ALIVE_COMMENT
    _chunk_object: ClassVar[str]

    def __init__(
        self,
        *,
        head: AnswerHead,
        tokenizer: TextTokenizer,
        include_usage: bool,
        continuous_usage: bool = False,
        prompt_logprobs: int | None = None,
        token_ids: bool = False,
    ) -> None:
        self._prompt_logprobs = prompt_logprobs
        self._with_token_ids = token_ids
        self._head = head._asdict()
        self._tokenizer = tokenizer
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._active_requests: Sequence[ActiveRequest] = ()
        self._around: dict[tuple[int, int], TextEvent] = {}  # by prompt and choice

    def opening(self, active_requests: Sequence[ActiveRequest]) -> bytes:
        """Return the events before the first delta."""
        self._active_requests = active_requests
        return b"".join(map(self._event, self._first_chunks(active_requests)))

    def prompt_logprobs(self, prompt: int, active: ActiveRequest) -> bytes:
        """Return the events with the prompt logprobs."""
        return b"".join(map(data_event, self._logprob_chunks(prompt, active)))

    def delta(self, prompt: int, delta: Delta) -> bytes:
        """Return the event of one delta."""
        if self._continuous_usage or not delta.only_text:
            return self._event(self.chunk(prompt, delta))
        place = (prompt, delta.choice)
        event = self._around.get(place)
        if event is None:
            sample = Delta(delta.choice, text=TextEvent.SAMPLE)
            event = self._around[place] = TextEvent(data_event(self.chunk(prompt, sample)))
        return event.of(delta.text)

    def texts(self, texts: Sequence[str]) -> bytes:
        """Return the events of the only choice of a plain response, one for each text."""
        event = self._around.get((0, 0))
        if not texts or event is None or self._continuous_usage:
            return super().texts(texts)
        return event.of_each(texts)

    def failed(self, error: BatonError) -> bytes:
        """Return the event that ends a stream with an error."""
        return data_event(error.body())

    def ended(self, active_requests: Sequence[ActiveRequest]) -> bytes:
        """Return the events after the last delta: the usage, without choices."""
        if not self._include_usage:
            return DONE
        return data_event({**self._chunk([]), "usage": usage(active_requests)}) + DONE

    def _event(self, chunk: dict[str, Any]) -> bytes:
        if self._continuous_usage:
            chunk["usage"] = usage(self._active_requests)
        return data_event(chunk)

    def _first_chunks(self, active_requests: Sequence[ActiveRequest]) -> list[dict[str, Any]]:
        """Return the chunks before the first delta."""
        raise NotImplementedError

    def _logprob_chunks(self, prompt: int, active: ActiveRequest) -> list[dict[str, Any]]:
        """Return the chunks with the prompt logprobs; none by default."""
        return []

    def chunk(self, prompt: int, delta: Delta) -> dict[str, Any]:
        """Return the chunk of one delta of one choice."""
        raise NotImplementedError

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self._chunk_object, "choices": choices}
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _choice_chunk(
        self,
        index: int,
        part: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        end = {"logprobs": logprobs, "finish_reason": finish_reason}
        return self._chunk([{"index": index, **part, **end}])

    def _ended(self, chunk: dict[str, Any], delta: Delta) -> dict[str, Any]:
        """Add the fields of a choice's last chunk, and the token ids."""
        if delta.finish_reason is not None:
            chunk["choices"][0]["stop_reason"] = delta.stop_reason
        chunk["choices"][0].update(self._token_ids(delta))
        return chunk

    def _token_ids(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": delta.token_ids} if self._with_token_ids else {}

    def _prompt_ids(self, active: ActiveRequest) -> dict[str, Any]:
        return {"prompt_token_ids": list(active.request.prompt)} if self._with_token_ids else {}

    def _vllm(self, active: ActiveRequest) -> dict[str, Any]:
        """Return vLLM's field ``prompt_logprobs``, if requested."""
        if self._prompt_logprobs is None:
            return {}
        view = PromptView.of(active, self._tokenizer)
        return {"prompt_logprobs": view.vllm(self._prompt_logprobs) if view else None}


class ChatFormat(_Format):
    """Format of chats: ``chat.completion`` and ``chat.completion.chunk``.

    Args:
        n: Number of choices.
        custom: Names of custom tools.
        functions: Whether calls have the form of the old API, ``function_call``.
        **common: Arguments of ``_Format``.
    """

    _chunk_object = "chat.completion.chunk"

    def __init__(
        self, *, n: int, custom: Collection[str] = (), functions: bool = False, **common: Any
    ) -> None:
        super().__init__(**common)
        self._n = n
        self._functions = functions
        self._calls = ChatCalls(custom)

    def _first_chunks(self, active_requests: Sequence[ActiveRequest]) -> list[dict[str, Any]]:
        """Return a chunk with the role of every choice."""
        part = {"delta": {"role": "assistant", "content": ""}}
        chunks = [self._choice_chunk(index, part) for index in range(self._n)]
        chunks[0].update(self._prompt_ids(active_requests[0]))
        return chunks

    def _logprob_chunks(self, prompt: int, active: ActiveRequest) -> list[dict[str, Any]]:
        """Return a chunk without choices."""
        return [{**self._chunk([]), **self._vllm(active)}]

    def chunk(self, prompt: int, delta: Delta) -> dict[str, Any]:
        """Return a chunk with new content; the last one of a choice has its finish reason."""
        content: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        calls = [_call_chunk(call) for call in self._calls.of(delta)]
        if calls and self._functions:
            content["function_call"] = calls[0]["function"]
        elif calls:
            content["tool_calls"] = calls
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        part = {"delta": content}
        chunk = self._choice_chunk(delta.choice, part, logprobs, self._reason(delta))
        return self._ended(chunk, delta)

    def whole(self, active_requests: Sequence[ActiveRequest]) -> dict[str, Any]:
        """Return all choices with their messages."""
        record = active_requests[0].record
        with_logprobs = record.request.sampling.logprobs is not None
        choices = [
            {
                "index": delta.choice,
                "message": self._message(delta),
                "logprobs": self._logprobs(delta.logprobs) if with_logprobs else None,
                "finish_reason": self._reason(delta),
                "stop_reason": delta.stop_reason,
                **self._token_ids(delta),
            }
            for delta in record.take()
        ]
        first = active_requests[0]
        extra = {**self._vllm(first), **self._prompt_ids(first)}
        head = {**self._head, "object": "chat.completion", **extra}
        return {**head, "choices": choices, "usage": usage(active_requests)}

    def _reason(self, delta: Delta) -> str | None:
        if delta.finish_reason == "tool_calls" and self._functions:
            return "function_call"
        return delta.finish_reason

    def _message(self, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
        calls: dict[int, dict[str, Any]] = {}
        for call in self._calls.of(delta):
            if call.id is not None:
                named = {"name": call.name, call.field: ""}
                calls[call.index] = {"id": call.id, "type": call.kind, call.kind: named}
            calls[call.index][call.kind][call.field] += call.text
        if delta.reasoning:
            message["content"] = delta.text or None
            message["reasoning_content"] = delta.reasoning
        if calls:
            message["content"] = delta.text or None
            if self._functions:
                message["function_call"] = calls[0]["function"]
            else:
                message["tool_calls"] = list(calls.values())
        return message

    def _logprobs(self, shown: Sequence[ShownLogprob]) -> dict[str, Any]:
        content = [shown_logprob(self._tokenizer, entry) for entry in shown]
        return {"content": content, "refusal": None}


def _call_chunk(call: ShownCall) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, call.kind: {call.field: call.text}}
    named = {"name": call.name, call.field: call.text}
    return {"index": call.index, "id": call.id, "type": call.kind, call.kind: named}


class CompletionFormat(_Format):
    """Format of text completions (``text_completion``); choices are numbered over all prompts.

    Args:
        n: Number of choices of each prompt.
        echoes: Texts of the prompts, if they precede the answers.
        echo_logprobs: Number of alternatives in the echoed prompts' logprobs; None: no logprobs.
        **common: Arguments of ``_Format``.
    """

    _chunk_object = "text_completion"

    def __init__(
        self,
        *,
        n: int,
        echoes: Sequence[str] | None,
        echo_logprobs: int | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self._n = n
        self._echoes = echoes
        self._echo_logprobs = echo_logprobs if echoes is not None else None
        self._prompt_fields: dict[int, dict[str, Any]] = {}  # for the first chunk of each choice

    def _logprob_chunks(self, prompt: int, active: ActiveRequest) -> list[dict[str, Any]]:
        """Return a chunk for each choice with the echoed prompt's logprobs, and vLLM's field."""
        logprobs = self._echoed_logprobs(prompt, active)
        text = self._echo(prompt) if logprobs is not None else ""
        chunks = []
        for choice in range(self._n):
            chunk = self._choice_chunk(prompt * self._n + choice, {"text": text}, logprobs)
            chunk["choices"][0].update(self._vllm(active))
            chunks.append(chunk)
        return chunks

    def _echoed_logprobs(self, prompt: int, active: ActiveRequest) -> dict[str, list[Any]] | None:
        if self._echo_logprobs is None:
            return None
        view = PromptView.of(active, self._tokenizer)
        if view is None:
            return None
        return view.openai(self._echo_logprobs, self._echo(prompt))

    def _echo(self, prompt: int) -> str:
        return self._echoes[prompt] if self._echoes is not None else ""

    def _first_chunks(self, active_requests: Sequence[ActiveRequest]) -> list[dict[str, Any]]:
        """Return the echoed prompts, unless they wait for their logprobs."""
        self._prompt_fields = {
            prompt * self._n + choice: self._prompt_ids(active)
            for prompt, active in enumerate(active_requests)
            for choice in range(self._n)
        }
        if self._echo_logprobs is not None:
            return []
        return [
            self._choice_chunk(prompt * self._n + choice, {"text": text})
            for prompt, text in enumerate(self._echoes or ())
            for choice in range(self._n)
        ]

    def chunk(self, prompt: int, delta: Delta) -> dict[str, Any]:
        """Return a chunk with new text."""
        logprobs = self._logprobs(prompt, delta.logprobs) if delta.logprobs else None
        index = prompt * self._n + delta.choice
        chunk = self._choice_chunk(index, {"text": delta.text}, logprobs, delta.finish_reason)
        chunk["choices"][0].update(self._prompt_fields.pop(index, {}))
        return self._ended(chunk, delta)

    def whole(self, active_requests: Sequence[ActiveRequest]) -> dict[str, Any]:
        """Return all choices of all prompts."""
        choices = []
        for prompt, active in enumerate(active_requests):
            echo = self._echo(prompt)
            echoed = self._echoed_logprobs(prompt, active)
            extra = {**self._vllm(active), **self._prompt_ids(active)}
            with_logprobs = active.request.sampling.logprobs is not None
            choices += [
                {
                    "index": prompt * self._n + delta.choice,
                    "text": echo + delta.text,
                    "logprobs": self._logprobs(prompt, delta.logprobs, echoed)
                    if with_logprobs
                    else None,
                    "finish_reason": delta.finish_reason,
                    "stop_reason": delta.stop_reason,
                    **self._token_ids(delta),
                    **extra,
                }
                for delta in active.record.take()
            ]
        head = {**self._head, "object": "text_completion"}
        return {**head, "choices": choices, "usage": usage(active_requests)}

    def _logprobs(
        self,
        prompt: int,
        shown: Sequence[ShownLogprob],
        echoed: dict[str, list[Any]] | None = None,
    ) -> dict[str, Any]:
        tokenizer = self._tokenizer
        before = len(self._echo(prompt))
        columns: dict[str, list[Any]] = {
            "tokens": [token_key(tokenizer, entry.token_id) for entry in shown],
            "token_logprobs": [entry.logprob for entry in shown],
            "top_logprobs": [
                top_by_key(tokenizer, entry.token_id, entry.logprob, entry.top) for entry in shown
            ],
            "text_offset": [before + entry.text_offset for entry in shown],
        }
        if echoed is None:
            return columns
        return {name: echoed[name] + values for name, values in columns.items()}


class TokensFormat(_Format):
    """Format of vLLM's ``/inference/v1/generate``: token ids without text."""

    def _first_chunks(self, active_requests: Sequence[ActiveRequest]) -> list[dict[str, Any]]:
        """Return no chunk: the first one has tokens."""
        self._first = self._prompt_ids(active_requests[0])
        self._alternatives = active_requests[0].request.sampling.logprobs
        return []

    def chunk(self, prompt: int, delta: Delta) -> dict[str, Any]:
        """Return a chunk with new tokens."""
        first, self._first = self._first, {}
        return {**self._chunk([self._choice(delta)]), **first}

    def whole(self, active_requests: Sequence[ActiveRequest]) -> dict[str, Any]:
        """Return the response in one piece, with all choices."""
        active = active_requests[0]
        self._first_chunks(active_requests)
        whole = self._chunk([self._choice(delta) for delta in active.record.take()])
        whole |= {"model": self._head["model"], "created": self._head["created"]}
        return {**whole, **self._vllm(active), **self._first, "usage": usage(active_requests)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"request_id": self._head["id"], "output_mode": "tokens"}
        return {**head, "choices": choices, "usage": None}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        logprobs = None
        if self._alternatives is not None:
            content = [_scored(entry, self._alternatives) for entry in delta.logprobs]
            rest = [_candidate(token, _NO_LOGPROB) for token in delta.token_ids[len(content) :]]
            logprobs = {"content": content + [{**token, "top_logprobs": []} for token in rest]}
        return {
            "index": delta.choice,
            "token_ids": delta.token_ids,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "logprobs": logprobs,
        }


def _scored(entry: ShownLogprob, alternatives: int) -> dict[str, Any]:
    """Return a token with its candidates, itself first, as many as ``alternatives``."""
    top = {item[0]: _candidate(*item, rank) for rank, item in enumerate(entry.top, start=1)}
    own = top.pop(entry.token_id, None) or _candidate(entry.token_id, entry.logprob)
    return {**own, "top_logprobs": [own, *top.values()][: max(alternatives, 1)]}


def _candidate(token_id: int, logprob: float, rank: int | None = None) -> dict[str, Any]:
    return {"token_id": token_id, "logprob": max(_NO_LOGPROB, logprob), "rank": rank}
