"""Log-probabilities of a prompt's tokens in a response of vLLM, without I/O."""

from collections.abc import Sequence

import msgspec
import numpy as np

from baton.types.errors import InternalError
from baton.types.prompt_outputs import PromptLogprobs


class _Candidate(msgspec.Struct, frozen=True):
    logprob: float
    rank: int


class _ScoredPrompt(msgspec.Struct, frozen=True):
    prompt_logprobs: tuple[dict[int, _Candidate] | None, ...]


def prompt_logprobs(body: bytes, prompt: Sequence[int], alternatives: int) -> PromptLogprobs:
    """Return the scores in the body of a response that has a row for each prompt token.

    Raises:
        InternalError: It is no such response, or of another prompt.
    """
    try:
        rows = [row or {} for row in msgspec.json.decode(body, type=_ScoredPrompt).prompt_logprobs]
        own = [row[token] for row, token in zip(rows[1:], prompt[1:], strict=True)]
        best = [
            sorted(row.items(), key=lambda candidate: candidate[1].rank)[:alternatives]
            for row in rows[1:]
        ]
        logprobs = [[candidate.logprob for _, candidate in row] for row in best]
        return PromptLogprobs(
            alternatives,
            np.array([candidate.logprob for candidate in own], "<f4").tobytes(),
            np.array([candidate.rank for candidate in own], "<u4").tobytes(),
            np.array([[token for token, _ in row] for row in best], "<u4").tobytes(),
            np.array(logprobs, "<f4").tobytes(),
        )
    except (msgspec.DecodeError, KeyError, ValueError) as error:
        raise InternalError(f"vLLM sent no log-probabilities of the prompt: {error!r}") from None
