"""The input of a custom tool, read from pieces of JSON."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.frontend.api.tool_use.custom import InputReader

_TEXT = st.text(alphabet=st.sampled_from('a"\\/u0123d8\n\t\b😀é\u2028 {}'), max_size=60)


def read(pieces: list[str]) -> str:
    reader = InputReader()
    return "".join([reader.push(piece) for piece in pieces] + [reader.finish()])


@given(text=_TEXT, is_ascii=st.booleans(), cuts=st.lists(st.integers(0, 300), max_size=12))
def test_any_text_in_any_pieces(text: str, *, is_ascii: bool, cuts: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    places = sorted({0, len(arguments), *(cut % (len(arguments) + 1) for cut in cuts)})
    pieces = [arguments[a:b] for a, b in pairwise(places)]
    assert read(pieces) == text


@given(text=_TEXT, cut=st.integers(0, 300))
def test_a_cut_off_input_is_a_beginning(text: str, cut: int) -> None:
    arguments = json.dumps({"input": text})
    shown = read(list(arguments[: len('{"input": "') + cut]))
    assert text.startswith(shown)


def test_arguments_of_another_form_are_kept() -> None:
    assert read(['{"text": ', '"x"}']) == '{"text": "x"}'
    assert read(["{}"]) == "{}"
