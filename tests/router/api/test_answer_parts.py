"""Deltas of an answer, split into parts; a client that is slow gets several steps in one delta."""

from baton.text.tool_calls import CallDelta
from router.frontend.api.formats.answer_parts import AnswerParts, Begin, End, More
from router.routing.choice import Delta


def test_text_behind_a_call_does_not_tear_it() -> None:
    answer = AnswerParts(lambda kind, _: kind, {"shell"})
    events = answer.push(Delta(0, calls=[CallDelta(0, "c0", "f", '{"a": "')]))
    events += answer.push(
        Delta(
            0,
            text="Done",
            calls=[CallDelta(0, None, None, 'xyz"}'), CallDelta(1, "c1", "shell", '{"input": "l')],
        )
    )
    events += answer.push(Delta(0, text="!", calls=[CallDelta(1, None, None, 's"}')]))
    events += answer.finish()
    assert [(part.kind, part.name, part.text) for part in answer.parts] == [
        ("call", "f", '{"a": "xyz"}'),
        ("text", "", "Done"),
        ("call", "shell", "ls"),
        ("text", "", "!"),
    ]
    kinds = [type(event) for event in events if not isinstance(event, More)]
    assert kinds == [Begin, End] * 4
