"""Sampling of requests that vLLM's HTTP interface cannot express; ``extra_args`` has what it needs.

- ``baton_bad_words``: sequences of tokens that a response must not have. vLLM takes texts only.
- ``baton_emitted``: tokens of a response with a format which another worker has sent. They are a
  part of the prompt here, and the grammar of the rest begins behind them.

vLLM loads this module as a plugin in each of its processes, as ``baton_waits.py``.
"""

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output import StructuredOutputManager

_take_texts: Any = SamplingParams.update_from_tokenizer
_CREATE = "_create_grammar"
_create_grammar: Any = getattr(StructuredOutputManager, _CREATE)


def install() -> None:
    """Let this process of vLLM heed the extra arguments."""
    SamplingParams.update_from_tokenizer = _take_words
    setattr(StructuredOutputManager, _CREATE, _grammar_behind)


def _take_words(self: Any, tokenizer: Any) -> None:
    _take_texts(self, tokenizer)
    words = (self.extra_args or {}).get("baton_bad_words")
    if words:
        self._bad_words_token_ids = words


def _grammar_behind(self: Any, request: Any) -> Any:
    """Return the grammar of a request behind the tokens that it continues from.

    Raises:
        ValueError: The tokens do not match the grammar.
    """
    grammar = _create_grammar(self, request)
    emitted = (request.sampling_params.extra_args or {}).get("baton_emitted")
    if emitted and not grammar.accept_tokens(request.request_id, emitted):
        raise ValueError("the tokens before the resumption do not match the format")
    return grammar
