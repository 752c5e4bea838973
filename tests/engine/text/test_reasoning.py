"""Thinking is told apart from the answer, however the text comes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from baton.text.grammar import Framed, GrammarCompiler, translate, vocabulary_of
from baton.text.reasoning import ReasoningParser, ReasoningSyntax, ReasoningTags, Thinking
from baton.text.tokenizer import TextTokenizer
from baton.types.errors import InvalidRequestError
from tests.engine.text.reading import thoughts_and_content

TAGS = ReasoningTags("<think>", "</think>")
SYNTAX = ReasoningSyntax(tags=TAGS)


def read(pieces, begun=False):
    return thoughts_and_content(ReasoningParser(Thinking(SYNTAX, begun)), pieces)


@pytest.mark.parametrize(
    ("text", "begun", "thoughts", "content"),
    [
        ("", False, "", ""),
        ("Paris", False, "", "Paris"),
        ("  Paris\n", False, "", "  Paris\n"),
        ("<think>\nHm. \n</think>\n\nParis ", False, "Hm.", "Paris "),
        ("\n<think>Hm.</think>Paris", False, "Hm.", "Paris"),
        ("<think>\n\n</think>\n\nParis", False, "", "Paris"),
        ("<thinking>", False, "", "<thinking>"),
        ("<thi", False, "", "<thi"),
        ("See <think>x</think>", False, "", "See <think>x</think>"),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("<think>never ends </thi", False, "never ends </thi", ""),
        ("Hm.\n</think>\n\nParis", True, "Hm.", "Paris"),
        ("<think>\nHm.</think>Paris", True, "Hm.", "Paris"),  # it writes the tag once more
        ("Hm", True, "Hm", ""),
        ("<", True, "<", ""),
        ("</think>Paris", True, "", "Paris"),
        ("<think>a < b </ c</think>", False, "a < b </ c", ""),
    ],
)
def test_what_is_read(text, begun, thoughts, content):
    assert read([text], begun) == (thoughts, content)
    for cut in range(len(text)):  # in two pieces, at all places
        assert read([text[:cut], text[cut:]], begun) == (thoughts, content)


@given(st.data())
def test_pieces_do_not_matter(data):
    parts = ["<think>", "</think>", "text", " ", "\n", "<", "</", "think>", "</thi", "\n\n"]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=8)))
    begun = data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert read(pieces, begun) == read([text], begun) == read(list(text), begun)


def test_thinking_comes_as_it_is_written():
    parser = ReasoningParser(Thinking(SYNTAX))
    assert parser.push("<thi") == ("", "")
    assert not parser.thinking
    assert parser.push("nk>a </") == ("a", "")  # a tag may follow, or a word
    assert parser.thinking
    assert parser.push("b> c") == (" </b> c", "")
    assert parser.push("</think>d") == ("", "d")
    assert not parser.thinking


def test_a_model_that_thinks_is_known_by_its_template(smollm):
    assert ReasoningSyntax.of("{{ messages }}", smollm) is None
    assert ReasoningSyntax.of(None, smollm) is None
    found = ReasoningSyntax.of("{{ content.split('</think>') }}", smollm)
    assert (found.tags, found.end_id) == (TAGS, None)
    assert found.begun_by("<|im_start|>assistant\n<think>\n")
    assert not found.begun_by("Say <think> to me<|im_end|>\n<|im_start|>assistant\n")
    assert found.closed_by("<think>\n\n</think>\n\n")


def test_a_model_that_thinks_is_known_by_its_vocabulary_too(smollm):
    """Its template may be one of the operator's that does not speak of thinking."""
    backend = Tokenizer.from_str(smollm.backend.to_str())
    backend.add_tokens([AddedToken(tag, special=tag == TAGS.end) for tag in TAGS])
    found = ReasoningSyntax.of("{{ messages }}", TextTokenizer(backend))
    assert found.tags == TAGS
    assert (found.begin_id, found.end_id) == (smollm.vocab_size, smollm.vocab_size + 1)
    assert found.special_ids == {found.end_id}  # text would not show it otherwise


@pytest.fixture(scope="module")
def compiler(smollm):
    return GrammarCompiler(vocabulary_of(smollm, smollm.vocab_size, (2,)))


YES = '{"answer": true}'
SCHEMA = '{"properties": {"answer": {"type": "boolean"}}, "additionalProperties": false}'


def fits(compiler, smollm, before, text):
    source = Framed("json", SCHEMA, before).encoded()
    matcher = compiler.compile(translate("framed", source))
    ids = smollm.encode(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("begun", "text", "good"),
    [
        (False, YES, True),
        (False, f"<think>Hm.</think>\n\n{YES}", True),
        (False, f"Hm. {YES}", False),
        (False, "<think>Hm.", False),
        (True, f"Hm.</think>\n\n{YES}", True),
        (True, YES, False),
    ],
)
def test_a_shape_begins_behind_the_thinking(compiler, smollm, begun, text, good):
    before = SYNTAX.grammar(begun=begun, end_ids=(2,), budget=None)
    assert fits(compiler, smollm, before, text) is good


ONE_TOKEN = ReasoningTags("<repo_name>", "<file_sep>")  # stands for tags that are single tokens


def one_token(smollm):
    begin_id, end_id = map(smollm.backend.token_to_id, (ONE_TOKEN.begin, ONE_TOKEN.end))
    return ReasoningSyntax(tags=ONE_TOKEN, begin_id=begin_id, end_id=end_id)


@pytest.mark.parametrize("begun", [False, True])
def test_a_budget_cuts_the_thinking_after_so_many_tokens(compiler, smollm, begun):
    before = one_token(smollm).grammar(begun=begun, end_ids=(2,), budget=3)
    thoughts = smollm.encode(" a b c d")
    assert len(thoughts) == 4
    begin = "" if begun else ONE_TOKEN.begin
    for count, good in ((0, True), (3, True), (4, False)):
        text = f"{begin}{smollm.decode(thoughts[:count])}{ONE_TOKEN.end}\n\n{YES}"
        assert fits(compiler, smollm, before, text) is good, count
    none = one_token(smollm).grammar(begun=begun, end_ids=(2,), budget=0)
    assert fits(compiler, smollm, none, f"{begin}{ONE_TOKEN.end}{YES}")
    assert not fits(compiler, smollm, none, f"{begin} a{ONE_TOKEN.end}{YES}")
    no_budget = one_token(smollm).grammar(begun=begun, end_ids=(2,), budget=None)
    assert fits(compiler, smollm, no_budget, f"{begin}{' a' * 50}{ONE_TOKEN.end}{YES}")
    assert not fits(compiler, smollm, no_budget, f"{begin}<|im_end|>{ONE_TOKEN.end}{YES}")


def test_thinking_whose_end_is_several_tokens_cannot_be_cut():
    with pytest.raises(InvalidRequestError, match="several tokens"):
        SYNTAX.grammar(begun=True, end_ids=(2,), budget=3)
