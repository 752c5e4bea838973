"""Prompts from recipes: the same (seed, key) gives the same words, on every machine.

Servers are asked in text, since that is what all of them take. The words are common English ones
that byte-pair tokenizers of the GPT-2, Llama and Qwen families write as one token each with the
space before them, so that a recipe's tokens are about the prompt's tokens; what the server counted
(``usage``) is what results report. Servers that take token ids in ``/v1/completions`` get exact
lengths (``--token-ids``).
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadtest.workloads.plan import Segment

UNIQUE_KEYS = 1 << 40
"""Segments that no other request shares have keys from here on; a trace's hashes lie below."""

# in every vocabulary in use, past special tokens
_FIRST_TOKEN_ID = 1_000
_LAST_TOKEN_ID = 30_000

_WORDS_FILE = Path(__file__).with_name("words.txt")


class PromptWriter:
    """Writes prompts out.

    Args:
        seed: Of the plan; another seed gives other words for the same recipe.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._words = np.array(_WORDS_FILE.read_text(encoding="utf-8").split(), dtype=object)

    def text(self, prompt: Iterable[Segment]) -> str:
        """The prompt as text: about one word for each token."""
        places = self._numbers(prompt, len(self._words))
        return " ".join(self._words[places])

    def token_ids(self, prompt: Iterable[Segment]) -> list[int]:
        """The prompt as token ids: as many as the recipe says."""
        ids: list[int] = self._numbers(prompt, _LAST_TOKEN_ID - _FIRST_TOKEN_ID).tolist()
        return [_FIRST_TOKEN_ID + number for number in ids]

    def _numbers(self, prompt: Iterable[Segment], below: int) -> NDArray[np.int64]:
        """Random numbers of the segments, one after another; a shorter segment is a prefix."""
        parts = [
            np.random.default_rng([self._seed, segment.key]).random(segment.tokens)
            for segment in prompt
        ]
        return (np.concatenate(parts or [np.empty(0)]) * below).astype(np.int64)
