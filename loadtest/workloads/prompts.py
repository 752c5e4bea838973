"""Prompts from recipes: equal (seed, key) give equal words on every machine.

Prompts are text by default, since all servers accept text. The words are common English ones that
byte-pair tokenizers of the GPT-2, Llama and Qwen families encode as one token each with the
preceding space, so that a recipe's tokens are about the prompt's tokens. Results use the server's
count (``usage``). Servers that accept token ids in ``/v1/completions`` get exact lengths
(``--token-ids``).
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loadtest.workloads.plan import Segment

UNIQUE_KEYS = 1 << 40
"""First key of segments that no other request shares; hashes of traces are below."""

BYTES_PER_WORD = 5.4
"""Mean length of a word with its space."""

# in every common vocabulary, past special tokens
_FIRST_TOKEN_ID = 1_000
_LAST_TOKEN_ID = 30_000

_WORDS_FILE = Path(__file__).with_name("words.txt")


class PromptWriter:
    """Expands prompts; another seed gives other words for the same recipe."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._words = np.array(_WORDS_FILE.read_text(encoding="utf-8").split(), dtype=object)

    def text(self, prompt: Iterable[Segment]) -> str:
        """Return the prompt as text with about one word per token."""
        indexes = self._numbers(prompt, len(self._words))
        return " ".join(self._words[indexes])

    def token_ids(self, prompt: Iterable[Segment]) -> list[int]:
        """Return the prompt as token ids of the recipe's exact length."""
        ids: list[int] = self._numbers(prompt, _LAST_TOKEN_ID - _FIRST_TOKEN_ID).tolist()
        return [_FIRST_TOKEN_ID + number for number in ids]

    def _numbers(self, prompt: Iterable[Segment], below: int) -> NDArray[np.int64]:
        parts = [
            np.random.default_rng([self._seed, segment.key]).random(segment.tokens)
            for segment in prompt
        ]
        return (np.concatenate(parts or [np.empty(0)]) * below).astype(np.int64)
