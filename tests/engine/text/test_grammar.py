"""What a grammar is made of, and what is refused with llguidance's reason."""

import json

import pytest

from baton.text.grammar import (
    ANY_OBJECT,
    MAX_SOURCE_CHARACTERS,
    GrammarCompiler,
    Vocabulary,
    translate,
    vocabulary_of,
)
from baton.types.errors import GrammarError
from tests.engine.text.test_tokenizer import sentencepiece

EOS = 2


@pytest.fixture(scope="module")
def compiler(smollm):
    return GrammarCompiler(vocabulary_of(smollm, 49_152 + 64, (EOS,)))


def fits(compiler, tokenizer, kind, source, text) -> bool:
    """Whether ``text``, as a whole, follows the grammar."""
    matcher = compiler.compile(translate(kind, source))
    ids = tokenizer.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


CITY = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "people": {"type": "integer", "minimum": 0}},
        "required": ["city"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(
    ("kind", "source", "yes", "no"),
    [
        ("json", CITY, '{"city": "Köln ✓", "people": 3}', '{"city": "Köln", "people": -3}'),
        ("json", CITY, '{\n  "city": "a"\n}', '{"people": 3}'),
        ("json", CITY, '{"city":"a"}', '{"city": "a", "mayor": "b"}'),
        ("json", ANY_OBJECT, '{"a": [1, {"b": null}]}', "[1]"),
        ("json", "true", "[1]", "[1"),
        ("regex", r"\d{3}-[a-z/\"]+", '123-a/b"', "12-a"),
        ("regex", r"\d", "7", "٧"),
        ("choice", '["yes", "no\\n/\\"{}", "für"]', 'no\n/"{}', "n"),
        ("grammar", 'start: "a" NAME\nNAME: /[b-d]+/', "abcd", "abcde"),
        ("grammar", 'root ::= "x" item*\nitem ::= [0-9] | "-"', "x1-2", "1"),
    ],
)
def test_what_fits(compiler, smollm, kind, source, yes, no):
    assert fits(compiler, smollm, kind, source, yes)
    assert not fits(compiler, smollm, kind, source, no)


def test_white_space_has_an_end(compiler, smollm):
    assert fits(compiler, smollm, "json", CITY, "{\n" + " " * 32 + '"city": "a"}')
    assert not fits(compiler, smollm, "json", CITY, '{"city":' + "\n" * 4 + '"a"}')


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("json", '{"type": "bogus"}', "Invalid type: bogus"),
        ("json", '{"not": {"type": "integer"}}', "the keyword not at #/not"),
        ("json", '{"type": "integer", "minimum": 5, "maximum": 2}', "Unsatisfiable"),
        ("json", '{"$ref": "http://example.org/a"}', "does not fetch"),
        ("json", "[1]", "must be an object or boolean"),
        ("json", "nonsense", "Expecting value"),
        ("regex", "(a", "unclosed group"),
        ("regex", r"[^\s\S]", "no text matches"),
        ("regex", "(?=a)b", "look-around"),
        ("grammar", "start: missing", "unknown name"),
        ("grammar", "root ::= " + "(" * 5000, "recursion"),
        ("grammar", 'root ::= "a', "at line 1"),
        ("json", '"' + "x" * MAX_SOURCE_CHARACTERS + '"', "the limit is 262144"),
    ],
)
def test_what_is_refused(compiler, kind, source, reason):
    with pytest.raises(GrammarError, match=reason) as caught:
        compiler.compile(translate(kind, source))
    assert "%json" not in caught.value.message, "our own translation is not shown"


def test_ids_beyond_the_text_and_special_ones_are_never_allowed(compiler, smollm):
    mask = compiler.compile(translate("regex", r"(?s:.*)")).compute_bitmask()
    allowed = [i for i in range(len(mask) * 8) if mask[i // 8] >> i % 8 & 1]
    assert len(allowed) > 48_000
    assert not smollm.special_ids - {EOS} & set(allowed)
    assert max(allowed) < smollm.vocab_size
    assert EOS in allowed


def test_sentencepiece_spells_spaces_and_bytes():
    from baton.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(sentencepiece())
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size, (2,))
    compiler = GrammarCompiler(vocabulary)
    text = "✓ 1"
    matcher = compiler.compile(translate("choice", json.dumps([text])))
    fed = 0
    for byte in text.encode():  # by its bytes alone
        token = vocabulary.tokens.index(bytes([byte]))
        fed += matcher.consume_token(token)
    assert fed == len(text.encode())
    assert matcher.is_accepting()


def test_a_model_without_an_end_token_takes_no_grammar():
    with pytest.raises(GrammarError, match="needs an end token"):
        GrammarCompiler(Vocabulary([b"a"], [], []))
