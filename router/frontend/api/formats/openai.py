"""Chat and text completions in OpenAI's shapes: whole and as chunks, made from the same deltas."""

from collections.abc import Sequence
from typing import Any

from baton.text.tokenizer import TextTokenizer
from baton.text.tool_calls import CallDelta
from router.frontend.api.formats.answer_format import usage
from router.frontend.api.formats.prompt_logprobs import PromptView
from router.routing.choice import Delta, ShownLogprob
from router.routing.requests.active_request import ActiveRequest


class _Format:
    """The parts that both formats share.

    Args:
        answer_id: ``chatcmpl-…`` or ``cmpl-…``.
        created: Unix time in seconds.
        model: The name that the client asked for.
        fingerprint: Changes when weights or numerics do.
        tokenizer: For tokens as text.
        include_usage: Every chunk of a stream has a ``usage`` field then.
        prompt_logprobs: vLLM's parameter: so many alternatives for each prompt token.
        token_ids: vLLM's parameter ``return_token_ids``.
    """

    def __init__(
        self,
        *,
        answer_id: str,
        created: int,
        model: str,
        fingerprint: str,
        tokenizer: TextTokenizer,
        include_usage: bool,
        prompt_logprobs: int | None = None,
        token_ids: bool = False,
    ) -> None:
        self._prompt_logprobs = prompt_logprobs
        self._with_token_ids = token_ids
        self._head = {
            "id": answer_id,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._tokenizer = tokenizer
        self._include_usage = include_usage

    def _chunk(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": kind, "choices": choices}
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _ended(self, chunk: dict[str, Any], delta: Delta) -> dict[str, Any]:
        """The last chunk of a choice says what ended it, as a whole answer does."""
        if delta.finish_reason is not None:
            chunk["choices"][0]["stop_reason"] = delta.stop_reason
        chunk["choices"][0].update(self._token_ids(delta))
        return chunk

    def _token_ids(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": delta.token_ids} if self._with_token_ids else {}

    def _prompt_ids(self, active: ActiveRequest) -> dict[str, Any]:
        return {"prompt_token_ids": list(active.request.prompt)} if self._with_token_ids else {}

    def _vllm(self, active: ActiveRequest) -> dict[str, Any]:
        """The field ``prompt_logprobs``, as in vLLM, where it was asked for."""
        if self._prompt_logprobs is None:
            return {}
        view = PromptView.of(active, self._tokenizer)
        return {"prompt_logprobs": view.vllm(self._prompt_logprobs) if view else None}


class ChatFormat(_Format):
    """``chat.completion`` and ``chat.completion.chunk``."""

    def __init__(self, *, n: int, **common: Any) -> None:
        super().__init__(**common)
        self._n = n

    def opening(self, active_requests: Sequence[ActiveRequest]) -> list[dict[str, Any]]:
        """The role of every choice."""
        delta = {"role": "assistant", "content": ""}
        chunks = [self._choice_chunk(index, delta, None, None) for index in range(self._n)]
        chunks[0].update(self._prompt_ids(active_requests[0]))
        return chunks

    def prompt_logprobs(self, prompt: int, active: ActiveRequest) -> list[dict[str, Any]]:
        """A chunk without choices."""
        return [{**self._chunk("chat.completion.chunk", []), **self._vllm(active)}]

    def chunk(self, prompt: int, delta: Delta) -> dict[str, Any]:
        """A piece of content; the last one of a choice has its finish reason."""
        content: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        if delta.calls:
            content["tool_calls"] = [_call_chunk(call) for call in delta.calls]
        logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
        chunk = self._choice_chunk(delta.choice, content, logprobs, delta.finish_reason)
        return self._ended(chunk, delta)

    def _choice_chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        finish_reason: str | None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._chunk("chat.completion.chunk", [choice])

    def usage_chunk(self, active_requests: Sequence[ActiveRequest]) -> dict[str, Any]:
        """No choices, only usage."""
        return {**self._chunk("chat.completion.chunk", []), "usage": usage(active_requests)}

    def whole(self, active_requests: Sequence[ActiveRequest]) -> dict[str, Any]:
        """All choices with their messages."""
        record = active_requests[0].record
        with_logprobs = record.request.sampling.logprobs is not None
        choices = [
            {
                "index": delta.choice,
                "message": _message(delta),
                "logprobs": self._logprobs(delta.logprobs) if with_logprobs else None,
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
                **self._token_ids(delta),
            }
            for delta in record.take()
        ]
        first = active_requests[0]
        extra = {**self._vllm(first), **self._prompt_ids(first)}
        head = {**self._head, "object": "chat.completion", **extra}
        return {**head, "choices": choices, "usage": usage(active_requests)}

    def _logprobs(self, shown: Sequence[ShownLogprob]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._token(entry.token_id, entry.logprob),
                    "top_logprobs": [self._token(*alternative) for alternative in entry.top],
                }
                for entry in shown
            ],
            "refusal": None,
        }

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelled = self._tokenizer.token_bytes(token_id)
        text = spelled.decode("utf-8", "replace")
        return {"token": text, "logprob": logprob, "bytes": list(spelled)}


def _call_chunk(call: CallDelta) -> dict[str, Any]:
    function = {"arguments": call.arguments}
    if call.id is None:
        return {"index": call.index, "function": function}
    named = {"name": call.name, **function}
    return {"index": call.index, "id": call.id, "type": "function", "function": named}


def _message(delta: Delta) -> dict[str, Any]:
    """A whole answer, put together from the deltas that a stream would have had."""
    message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
    calls: dict[int, dict[str, Any]] = {}
    for call in delta.calls:
        if call.id is not None:
            function = {"name": call.name, "arguments": ""}
            calls[call.index] = {"id": call.id, "type": "function", "function": function}
        calls[call.index]["function"]["arguments"] += call.arguments
    if delta.reasoning:
        message["content"] = delta.text or None
        message["reasoning_content"] = delta.reasoning
    if calls:
        message["content"] = delta.text or None
        message["tool_calls"] = list(calls.values())
    return message


class CompletionFormat(_Format):
    """``text_completion``; choices are numbered over all prompts.

    Args:
        n: Choices of each prompt.
        echoes: The prompts' texts, if they are to stand before the answers.
        echo_logprobs: With ``echoes``: the prompts' logprobs stand before the answers' as well,
            each with so many alternatives.
        **common: See ``_Format``.
    """

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
        self._untold: dict[int, dict[str, Any]] = {}  # prompt ids, for the first chunk of a choice

    def prompt_logprobs(self, prompt: int, active: ActiveRequest) -> list[dict[str, Any]]:
        """For each choice its echo with logprobs, and vLLM's field."""
        logprobs = self._echoed_logprobs(active)
        text = self._echo(prompt) if logprobs is not None else ""
        chunks = []
        for choice in range(self._n):
            chunk = self._choice_chunk(prompt * self._n + choice, text, logprobs, None)
            chunk["choices"][0].update(self._vllm(active))
            chunks.append(chunk)
        return chunks

    def _echoed_logprobs(self, active: ActiveRequest) -> dict[str, list[Any]] | None:
        if self._echo_logprobs is None:
            return None
        view = PromptView.of(active, self._tokenizer)
        return view.openai(self._echo_logprobs) if view is not None else None

    def _echo(self, prompt: int) -> str:
        return self._echoes[prompt] if self._echoes is not None else ""

    def opening(self, active_requests: Sequence[ActiveRequest]) -> list[dict[str, Any]]:
        """The prompts that are echoed without logprobs; the others wait for them."""
        self._untold = {
            prompt * self._n + choice: self._prompt_ids(active)
            for prompt, active in enumerate(active_requests)
            for choice in range(self._n)
        }
        if self._echo_logprobs is not None:
            return []
        return [
            self._choice_chunk(prompt * self._n + choice, text, None, None)
            for prompt, text in enumerate(self._echoes or ())
            for choice in range(self._n)
        ]

    def chunk(self, prompt: int, delta: Delta) -> dict[str, Any]:
        """A piece of text."""
        logprobs = self._logprobs(prompt, delta.logprobs) if delta.logprobs else None
        index = prompt * self._n + delta.choice
        chunk = self._choice_chunk(index, delta.text, logprobs, delta.finish_reason)
        chunk["choices"][0].update(self._untold.pop(index, {}))
        return self._ended(chunk, delta)

    def _choice_chunk(
        self, index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._chunk("text_completion", [choice])

    def usage_chunk(self, active_requests: Sequence[ActiveRequest]) -> dict[str, Any]:
        """No choices, only usage."""
        return {**self._chunk("text_completion", []), "usage": usage(active_requests)}

    def whole(self, active_requests: Sequence[ActiveRequest]) -> dict[str, Any]:
        """All choices of all prompts."""
        choices = []
        for prompt, active in enumerate(active_requests):
            echo = self._echo(prompt)
            echoed = self._echoed_logprobs(active)
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
        spell = self._tokenizer.token_text
        before = len(self._echo(prompt))
        columns: dict[str, list[Any]] = {
            "tokens": [spell(entry.token_id) for entry in shown],
            "token_logprobs": [entry.logprob for entry in shown],
            # Where two ids are spelled alike, the likelier one stands (they come best first).
            "top_logprobs": [
                {spell(token): value for token, value in reversed(entry.top)} for entry in shown
            ],
            "text_offset": [before + entry.text_offset for entry in shown],
        }
        if echoed is None:
            return columns
        return {name: echoed[name] + values for name, values in columns.items()}
