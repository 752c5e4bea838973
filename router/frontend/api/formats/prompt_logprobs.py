"""Log-probabilities of prompt tokens in two formats: OpenAI's ``echo`` and vLLM's own."""

from typing import Any

import numpy as np

from baton.text.detokenizer import Detokenizer
from baton.text.tokenizer import TextTokenizer
from baton.types.prompt_outputs import PromptLogprobs
from router.routing.requests.active_request import ActiveRequest


class PromptView:
    """Converter of a prompt's logprobs (of all tokens but the first) to the formats of APIs."""

    def __init__(
        self, prompt: tuple[int, ...], logprobs: PromptLogprobs, tokenizer: TextTokenizer
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

    def openai(self, alternatives: int) -> dict[str, list[Any]]:
        """Return the ``logprobs`` of an echoed prompt; values of the first token are null.

        Of two alternatives with the same text, only the likelier one appears.
        """
        spell = self._spell
        top = [
            {spell(token): value for token, value in reversed(best[:alternatives])}
            for best in self._top
        ]
        return {
            "tokens": [spell(token) for token in self._prompt],
            "token_logprobs": [None, *self._own],
            "top_logprobs": [None, *top],
            "text_offset": self._offsets(),
        }

    def _offsets(self) -> list[int]:
        """Return the position of each token's text in the echoed text."""
        detokenizer = Detokenizer(self._tokenizer)
        offsets = []
        cut = 0  # 1 if the first token adds a space that is not in the text
        for index, token in enumerate(self._prompt):
            offsets.append(max(detokenizer.text_length - cut, 0))
            shown = detokenizer.push(token)
            if index == 0 and self._tokenizer.strip_first_space and shown.startswith(" "):
                cut = 1
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
