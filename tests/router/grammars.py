"""Checks of texts against the grammars that routers send to workers."""

import functools

import llguidance

from baton.text.grammar import GrammarCompiler
from router.served_model import ServedModel


@functools.cache
def _compiler(model: ServedModel) -> GrammarCompiler:
    return GrammarCompiler(model.vocabulary())  # a third of a second


def matcher_of(model: ServedModel, grammar: str) -> llguidance.LLMatcher:
    return _compiler(model).compile(grammar)


def fits(model: ServedModel, grammar: str, text: str) -> bool:
    """Return whether a grammar accepts a text as a whole."""
    matcher = matcher_of(model, grammar)
    ids = model.tokenizer.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
