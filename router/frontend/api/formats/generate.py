"""Formats of vLLM's calls for token ids: answers of ``generate``, and rendered requests."""

from collections.abc import Sequence
from typing import Any

from baton.text.tokenizer import TextTokenizer
from router.frontend.api.bodies.chat import ChatBody
from router.frontend.api.bodies.completion import CompletionBody
from router.frontend.api.formats.answer_format import usage
from router.frontend.api.formats.prompt_logprobs import PromptView
from router.request import GenerationRequest
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.choice import Delta, ShownLogprob

_NO_LOGPROB = -9999.0  # vLLM's value for tokens without one, such as those that end an answer
_RENDERED = (
    *("n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids"),
    *("logprobs", "prompt_logprobs"),
)


class GenerateFormat:
    """Format of ``POST /inference/v1/generate``.

    Args:
        request_id: Id in the response.
        model: Name of the model.
        created: Time in Unix seconds.
        prompt_ids: Whether the response contains the prompt's token ids.
        tokenizer: Tokenizer for the texts of prompt logprobs.
    """

    def __init__(
        self,
        *,
        request_id: str,
        model: str,
        created: int,
        prompt_ids: bool,
        tokenizer: TextTokenizer,
    ) -> None:
        self._head = {"request_id": request_id, "output_mode": "tokens"}
        self._whole = {"model": model, "created": created}
        self._with_prompt_ids = prompt_ids
        self._tokenizer = tokenizer
        self._prompt: dict[str, Any] = {}  # for the first chunk
        self._alternatives: int | None = None

    def opening(self, active_requests: Sequence[ActiveRequest]) -> list[dict[str, Any]]:
        """Return no chunk: the first one has tokens."""
        request = active_requests[0].request
        self._alternatives = request.sampling.logprobs
        self._prompt = self._prompt_ids(request)
        return []

    def prompt_logprobs(self, prompt: int, active: ActiveRequest) -> list[dict[str, Any]]:
        """Return no chunk: vLLM's streams do not have them."""
        return []

    def chunk(self, prompt: int, delta: Delta) -> dict[str, Any]:
        """Return a chunk with new tokens."""
        first, self._prompt = self._prompt, {}
        return {**self._head, **first, "choices": [self._choice(delta)], "usage": None}

    def usage_chunk(self, active_requests: Sequence[ActiveRequest]) -> dict[str, Any]:
        """Return a chunk with the usage and without choices."""
        return {**self._head, "choices": [], "usage": usage(active_requests)}

    def whole(self, active_requests: Sequence[ActiveRequest]) -> dict[str, Any]:
        """Return the response in one piece, with all choices."""
        active = active_requests[0]
        sampling = active.request.sampling
        self._alternatives = sampling.logprobs
        view = PromptView.of(active, self._tokenizer)
        prompt_logprobs = None if view is None else view.vllm(sampling.prompt_logprobs or 0)
        return {
            **self._head,
            **self._whole,
            "choices": [self._choice(delta) for delta in active.record.take()],
            "usage": usage(active_requests),
            "prompt_logprobs": prompt_logprobs,
            **self._prompt_ids(active.request),
        }

    def _prompt_ids(self, request: GenerationRequest) -> dict[str, Any]:
        return {"prompt_token_ids": request.prompt} if self._with_prompt_ids else {}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        logprobs = None
        if self._alternatives is not None:
            content = [_scored(entry, self._alternatives) for entry in delta.logprobs]
            content += [
                {**_candidate(token, _NO_LOGPROB, None), "top_logprobs": []}
                for token in delta.token_ids[len(content) :]
            ]
            logprobs = {"content": content}
        return {
            "index": delta.choice,
            "token_ids": delta.token_ids,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            "logprobs": logprobs,
        }


def _scored(entry: ShownLogprob, alternatives: int) -> dict[str, Any]:
    """Return a token with its candidates, itself first, as many as ``alternatives``."""
    top = [_candidate(*item, rank) for rank, item in enumerate(entry.top, start=1)]
    rank = next((item["rank"] for item in top if item["token_id"] == entry.token_id), None)
    own = _candidate(entry.token_id, entry.logprob, rank)
    others = [item for item in top if item["token_id"] != entry.token_id]
    return {**own, "top_logprobs": [own, *others][: max(alternatives, 1)]}


def _candidate(token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"token_id": token_id, "logprob": max(_NO_LOGPROB, logprob), "rank": rank}


def rendered(body: ChatBody | CompletionBody, request: GenerationRequest) -> dict[str, Any]:
    """Return the body of ``POST /inference/v1/generate`` that is the same request."""
    params = request.sampling
    shown = request.shown
    sampling = {name: getattr(params, name) for name in _RENDERED} | {
        "seed": body.seed,
        "stop": shown.stops,
        "include_stop_str_in_output": shown.stop_text,
        "skip_special_tokens": not shown.special_tokens,
        "bad_words": body.bad_words,
        "logit_bias": {str(token): bias for token, bias in params.logit_bias} or None,
        "structured_outputs": {"grammar": params.grammar} if params.grammar else None,
    }
    options = body.stream_options
    return {
        "request_id": request.request_id,
        "token_ids": request.prompt,
        "sampling_params": sampling,
        "model": body.model,
        "stream": bool(body.stream),
        "stream_options": None if options is None else options.model_dump(),
        "cache_salt": body.cache_salt,
        "priority": request.priority,
    }
