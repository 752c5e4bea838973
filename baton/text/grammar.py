"""Grammars of responses: translation of client formats to one grammar, and its compilation.

Every format (JSON schema, regular expression, list of choices, Lark or GBNF grammar) becomes one
llguidance grammar, which is sent with the sampling parameters. The engine compiles it against the
model's vocabulary; its state is a function of the grammar and the response's tokens alone.

Compiling a hostile grammar can take long and overflow the stack. So a serving process compiles only
grammars that ``baton/text/grammar_check.py`` has compiled in a separate process.
"""

import json
import re
from collections.abc import Sequence
from typing import Literal

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from baton.text.json_schema import ready
from baton.text.schemas.numbers import literals
from baton.text.tokenizer import TextTokenizer
from baton.types.errors import GrammarError

GrammarKind = Literal["json", "regex", "choice", "grammar", "framed"]

MAX_SOURCE_CHARACTERS = 256 * 1024  # 200 medium tools, or a schema of 50 KB beside them
ANY_OBJECT = '{"type": "object"}'

# Accept any tokens that spell a forced text. Otherwise llguidance forces its own tokenization,
# which would have to be equal in every process, and is wrong for SentencePiece.
_FREE_SPELLING = '\n%llguidance {"no_forcing": true}\n'
_ASCII_DIGITS = "d"  # \\d means 0 to 9, not the digits of all scripts
_MAX_GRAMMAR_SYMBOLS = 200_000  # llguidance's own limit is 500,000, which takes over a second
_SHOWN_CHARACTERS = 400
_PLACE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")
_PICTURE = re.compile(r"\n +\d+ \| .*", re.DOTALL)  # lines of the translated grammar


class Vocabulary(msgspec.Struct, frozen=True):
    """Tokens of a model for a matcher, as plain data that is sent between processes."""

    tokens: list[bytes]  # by id; empty for ids without text
    special_ids: list[int]
    eos_token_ids: list[int]


def vocabulary_of(
    tokenizer: TextTokenizer, vocab_size: int, eos_token_ids: Sequence[int]
) -> Vocabulary:
    """Return the vocabulary of a model, whose ``vocab_size`` may exceed the tokenizer's."""
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
    special = sorted({*tokenizer.special_ids, *eos_token_ids})
    return Vocabulary(tokens, [i for i in special if i < vocab_size], list(eos_token_ids))


class Framed(msgspec.Struct, frozen=True):
    """Requested format, with alternatives and text before it.

    Attributes:
        before: Lark grammar of text before it; empty for none.
        instead: Lark grammar of an alternative to it; empty for none.
    """

    kind: GrammarKind
    source: str
    before: str = ""
    instead: str = ""

    def encoded(self) -> str:
        """Return the source of a grammar of the kind ``framed``."""
        return msgspec.json.encode(self).decode()


def translate(kind: GrammarKind, source: str) -> str:
    """Return the llguidance grammar of ``source``, which may still fail to compile.

    Args:
        kind: Kind of ``source``: a JSON schema, a regular expression, a JSON list of choices, a
            grammar in Lark or GBNF, or a `Framed` one of these.
        source: Text of the client.

    Raises:
        GrammarError: The text is too long or not of that kind.
    """
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise GrammarError(f"it has {len(source)} characters; the limit is {MAX_SOURCE_CHARACTERS}")
    try:
        return _lark(kind, source.removesuffix(_FREE_SPELLING)) + _FREE_SPELLING
    except Exception as error:  # the translators raise many types
        raise GrammarError(_sentence(str(error))) from error


def _lark(kind: GrammarKind, source: str) -> str:
    if kind == "json":
        schema = json.loads(source)
        if isinstance(schema, dict):
            if integers := literals(schema):
                return "start: " + " | ".join(f'"{integer}"' for integer in integers)
            schema = ready(schema)
        return f"start: %json {json.dumps(schema)}"
    if kind == "choice":
        return "start: " + " | ".join(json.dumps(choice) for choice in json.loads(source))
    if kind == "regex":
        return f"start: /{regex_to_lark(source, _ASCII_DIGITS)}/"
    if kind == "framed":
        return _framed(msgspec.json.decode(source, type=Framed))
    return any_to_lark(source)


def _framed(parts: Framed) -> str:
    """Join the parts as nested grammars, so that their names do not clash."""
    inner = {"main": _lark(parts.kind, parts.source)}
    if parts.before:
        inner["before"] = parts.before
    if parts.instead:
        inner["instead"] = parts.instead
    answer = "(main | instead)" if parts.instead else "main"
    start = f"before {answer}" if parts.before else answer
    rules = [f"{name}: %lark {{\n{text}\n}}" for name, text in inner.items()]
    return "\n".join([f"start: {start}", *rules])


class GrammarCompiler:
    """Thread-safe compiler of grammars for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.eos_token_ids:
            raise GrammarError("structured output needs an end token, which this model lacks")
        self._tokenizer = LLTokenizer(
            _Spelling(vocabulary),  # type: ignore[arg-type]
            eos_token=vocabulary.eos_token_ids,
        )
        self._limits = LLParserLimits(max_grammar_size=_MAX_GRAMMAR_SYMBOLS, verbose_errors=False)

    def compile(self, grammar: str) -> LLMatcher:
        """Return a matcher at the start of the grammar. Takes from 1 ms to several 100 ms.

        Raises ``GrammarError`` if llguidance rejects the grammar, or no text matches.
        """
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        check(matcher)
        matcher.compute_bitmask()
        check(matcher)
        return matcher


def check(matcher: LLMatcher) -> None:
    """Raise ``GrammarError`` if a matcher has failed."""
    if matcher.is_error():
        raise GrammarError(_sentence(matcher.get_error()))


def _sentence(error: str) -> str:
    """Return llguidance's message without debugging output."""
    if error.startswith("NoExtensionBias"):
        return "no text matches it"
    text = _PLACE.sub("", _PICTURE.sub("", error)).replace("<non-verbose/>", "").strip()
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


class _Spelling:
    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_token_ids[0]

    def __call__(self, text: bytes | str) -> list[int]:
        raise NotImplementedError("matchers consume tokens, not text")
