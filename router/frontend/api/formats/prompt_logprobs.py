"""Log-probabilities of tokens: OpenAI's entries and columns, and vLLM's of prompts."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from baton.text.detokenizer import Detokenizer
from baton.text.tokenizer import TextTokenizer
from baton.types.errors import InvalidRequestError
from baton.types.prompt_outputs import PromptLogprobs, bytes_per_row
from router.frontend.api.bodies.generation import GenerationBody
from router.request import GenerationRequest
from router.routing.requests.active_request import ActiveRequest
from router.routing.requests.choice import ShownLogprob

MAX_PROMPT_LOGPROBS_BYTES = 8 * 1024 * 1024  # per call; their JSON is fifty times as large


def token_key(tokenizer: TextTokenizer, token_id: int) -> str:
    """Return a token's name in OpenAI's columns: its text, or the bytes of a part of one."""
    spelled = tokenizer.token_bytes(token_id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def top_by_key(
    tokenizer: TextTokenizer, token_id: int, logprob: float, top: Iterable[tuple[int, float]]
) -> dict[str, float]:
    """Return the values of the likeliest tokens, and of the token itself, each under its own key.

    Of tokens with the same text, the token itself has the text as its key, or else the likeliest
    one. The others have their ids.
    """
    own = token_key(tokenizer, token_id)
    logprobs: dict[str, float] = {}
    for other, value in top:
        key = token_key(tokenizer, other)
        if other != token_id and (key == own or key in logprobs):
            key = f"token_id:{other}"
        logprobs[key] = value
    logprobs[own] = logprob
    return logprobs


def shown_logprob(tokenizer: TextTokenizer, entry: ShownLogprob) -> dict[str, Any]:
    """Return a token of an answer with its alternatives, as in OpenAI's chats and responses."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        spelled = tokenizer.token_bytes(token_id)
        text = spelled.decode("utf-8", "replace")
        return {"token": text, "logprob": logprob, "bytes": list(spelled)}

    top = [shown(*alternative) for alternative in entry.top]
    return {**shown(entry.token_id, entry.logprob), "top_logprobs": top}


class PromptView:
    """Converter of a prompt's logprobs (of all tokens but the first) to the formats of APIs."""

    def __init__(
        self, prompt: Sequence[int], logprobs: PromptLogprobs, tokenizer: TextTokenizer
    ) -> None:
        self._prompt = prompt
        self._spell = tokenizer.token_text
        self._tokenizer = tokenizer
        shape = (logprobs.rows, logprobs.alternatives)
        self._own: list[float] = np.frombuffer(logprobs.logprobs, "<f4").tolist()
        self._ranks: list[int] = np.frombuffer(logprobs.ranks, "<u4").tolist()
        ids = np.frombuffer(logprobs.top_ids, "<u4").reshape(shape).tolist()
        values = np.frombuffer(logprobs.top_logprobs, "<f4").reshape(shape).tolist()
        self._top: list[list[tuple[int, float]]] = [
            list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)
        ]

    @classmethod
    def of(cls, active: ActiveRequest, tokenizer: TextTokenizer) -> "PromptView | None":
        """Return the view of a request's prompt; None if its logprobs were not requested."""
        logprobs = active.record.prompt_logprobs
        return None if logprobs is None else cls(active.request.prompt, logprobs, tokenizer)

    def openai(self, alternatives: int, echo: str) -> dict[str, list[Any]]:
        """Return the ``logprobs`` of a prompt with the text ``echo``; the first token has none."""
        tokenizer = self._tokenizer
        top = [
            top_by_key(tokenizer, token, own, best[:alternatives])
            for token, own, best in zip(self._prompt[1:], self._own, self._top, strict=True)
        ]
        return {
            "tokens": [token_key(tokenizer, token) for token in self._prompt],
            "token_logprobs": [None, *self._own],
            "top_logprobs": [None, *top],
            "text_offset": self._offsets(echo),
        }

    def _offsets(self, echo: str) -> list[int]:
        """Return the position of each token's text in the echoed text.

        Special tokens are in the text of a client, but not in one that was decoded.
        """
        detokenizer = Detokenizer(self._tokenizer)
        special_ids = self._tokenizer.special_ids
        strips = self._tokenizer.strip_first_space  # which the first token adds to the text
        offsets = []
        at = 0
        for token in self._prompt:
            offsets.append(at)
            if token in special_ids:
                text = self._spell(token)
                at += len(text) if echo.startswith(text, at) else 0
                continue
            text = detokenizer.push(token)
            at += len(text) - (strips and text.startswith(" "))
            strips = strips and not text
        return offsets

    def vllm(self, alternatives: int) -> list[dict[str, Any] | None]:
        """Return vLLM's ``prompt_logprobs`` by token id, always including the token itself."""
        entries: list[dict[str, Any] | None] = [None]
        for token, own, rank, top in zip(
            self._prompt[1:], self._own, self._ranks, self._top, strict=True
        ):
            entry = {str(token): self._entry(token, own, rank)}
            for place, (other, value) in enumerate(top[:alternatives], start=1):
                entry.setdefault(str(other), self._entry(other, value, place))
            entries.append(entry)
        return entries

    def _entry(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": self._spell(token)}


def check_prompt_logprobs(body: GenerationBody, requests: Sequence[GenerationRequest]) -> None:
    """Reject more prompt logprobs than one response may hold; each choice repeats them."""
    alternatives = requests[0].sampling.prompt_logprobs
    if alternatives is None:
        return
    tokens = sum(len(request.prompt) * request.sampling.n for request in requests)
    most = MAX_PROMPT_LOGPROBS_BYTES // bytes_per_row(alternatives)
    if tokens > most:
        raise InvalidRequestError(
            f"log-probabilities of {tokens} prompt tokens (of all prompts, times n) with "
            f"{alternatives} alternatives each are too many for one call; send at most {most} "
            "tokens, or request fewer alternatives",
            param="logprobs" if body.prompt_logprobs is None else "prompt_logprobs",
        )
