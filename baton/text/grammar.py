"""Grammars of answers: from what a client asks for to one string, and from that to a matcher.

llguidance does the work. Everything that a request can say about the shape of its answer (a JSON
schema, a regular expression, a list of choices, a Lark or GBNF grammar) becomes one llguidance
grammar, which travels with the sampling parameters. Whoever samples compiles it against the
model's vocabulary; the compiled state is a function of the grammar and the answer's tokens alone.

Compiling a hostile grammar can take long, and can overflow the stack of the process that does it.
So nothing is compiled in a process that serves before ``baton/text/grammar_check.py`` has
compiled it in a process of its own.
"""

import json
import re
from collections.abc import Sequence
from typing import Literal

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from baton.text.json_schema import ready
from baton.text.tokenizer import TextTokenizer
from baton.types.errors import GrammarError

GrammarKind = Literal["json", "regex", "choice", "grammar", "framed"]

MAX_SOURCE_CHARACTERS = 256 * 1024  # 200 tools of some size, or a schema of 50 KB beside them
ANY_OBJECT = '{"type": "object"}'

# Any tokens that spell a forced text will do. Otherwise llguidance would insist on its own cut of
# it into tokens, which would have to be the same in every process, and is wrong for SentencePiece.
_FREE_SPELLING = '\n%llguidance {"no_forcing": true}\n'
_ASCII_DIGITS = "d"  # \\d means 0 to 9, not the digits of all scripts
_MAX_GRAMMAR_SYMBOLS = 200_000  # llguidance's own limit is 500,000, which takes over a second
_SHOWN_CHARACTERS = 400
_PLACE = re.compile(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?")
_PICTURE = re.compile(r"\n +\d+ \| .*", re.DOTALL)  # lines of our own translation


class Vocabulary(msgspec.Struct, frozen=True):
    """The tokens of a model, as a matcher needs them; plain data that crosses a process border."""

    tokens: list[bytes]  # by id; empty for ids that no text has
    special_ids: list[int]
    eos_token_ids: list[int]


def vocabulary_of(
    tokenizer: TextTokenizer, vocab_size: int, eos_token_ids: Sequence[int]
) -> Vocabulary:
    """The vocabulary of a model.

    Args:
        tokenizer: Spells the tokens.
        vocab_size: Of the model, which may be padded beyond the tokenizer's.
        eos_token_ids: Tokens that end an answer.
    """
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
    special = sorted({*tokenizer.special_ids, *eos_token_ids})
    return Vocabulary(tokens, [i for i in special if i < vocab_size], list(eos_token_ids))


class Framed(msgspec.Struct, frozen=True):
    """What a client asks for, and what may stand before it or in its place.

    Attributes:
        kind: As of `translate`; not ``framed``.
        source: As of `translate`.
        before: A Lark grammar of what comes first; empty for nothing.
        instead: A Lark grammar of what else the answer may be; empty for nothing.
    """

    kind: GrammarKind
    source: str
    before: str = ""
    instead: str = ""

    def encoded(self) -> str:
        """The source of a grammar of the kind ``framed``."""
        return msgspec.json.encode(self).decode()


def translate(kind: GrammarKind, source: str) -> str:
    """The llguidance grammar that ``source`` stands for.

    Args:
        kind: What ``source`` is: a JSON schema, a regular expression, a JSON list of choices, or
            a grammar in Lark or GBNF, or a `Framed` one of these.
        source: The text.

    Raises:
        GrammarError: It is too long, or not of that kind. Whether it compiles shows later.
    """
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise GrammarError(
            f"it has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS} are taken"
        )
    try:
        return _lark(kind, source) + _FREE_SPELLING
    except Exception as error:  # the translators raise much that is no ValueError
        raise GrammarError(_sentence(str(error))) from error


def _lark(kind: GrammarKind, source: str) -> str:
    if kind == "json":
        schema = json.loads(source)
        if isinstance(schema, dict):
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
    """Each part is a grammar of its own inside the whole one, so that no names meet."""
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
    """Compiles grammars against one vocabulary; usable from any thread.

    Args:
        vocabulary: Of the model.

    Raises:
        GrammarError: The model has no end token, so that no answer could ever be complete.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.eos_token_ids:
            raise GrammarError("this model has no end token, which structured output needs")
        self._tokenizer = LLTokenizer(
            _Spelling(vocabulary),  # type: ignore[arg-type]
            eos_token=vocabulary.eos_token_ids,
        )
        self._limits = LLParserLimits(max_grammar_size=_MAX_GRAMMAR_SYMBOLS, verbose_errors=False)

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher at the start of the grammar. Takes from 1 ms to several 100 ms.

        Raises:
            GrammarError: llguidance refuses it (the message is llguidance's), or no text fits.
        """
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        check(matcher)
        matcher.compute_bitmask()
        check(matcher)
        return matcher


def check(matcher: LLMatcher) -> None:
    """Raise what went wrong in a matcher, if anything did.

    Raises:
        GrammarError: The matcher is of no more use.
    """
    if matcher.is_error():
        raise GrammarError(_sentence(matcher.get_error()))


def _sentence(error: str) -> str:
    """Llguidance's message without what is meant for its authors."""
    if error.startswith("NoExtensionBias"):
        return "no text fits it"
    text = _PLACE.sub("", _PICTURE.sub("", error)).replace("<non-verbose/>", "").strip()
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


class _Spelling:
    """A vocabulary in the form that ``LLTokenizer`` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_token_ids[0]

    def __call__(self, text: bytes | str) -> list[int]:
        raise NotImplementedError("matchers are fed with tokens, never with text")
