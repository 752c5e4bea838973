"""Changes of a session's prompt are found, and its growth, its sub-agents and its ends are none."""

import random

import pytest

from router.sessions.prompts import LEAST_LOST_TOKENS, SessionPrompts

SESSION = ("tenant", "", "m", "s")


def text(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(50_000) for _ in range(tokens)]


SYSTEM = text(1, 40)
BODY = text(2, 30_000)


@pytest.mark.parametrize(
    ("first", "second", "at"),
    [
        ([9, 9], [8, 8], 40),  # of equal length
        ([9], text(4, 12), 40),  # longer
        (text(5, 900), [7], 40),  # shorter
        ([], text(6, 500), 40),  # inserted
        (text(7, 300), [], 40),  # left out
    ],
)
def test_a_change_is_found_at_its_token(first: list[int], second: list[int], at: int) -> None:
    prompts = SessionPrompts()
    assert prompts.note(SESSION, SYSTEM + first + BODY) is None
    prompt = SYSTEM + second + BODY + text(3, 200)
    change = prompts.note(SESSION, prompt)
    assert change is not None
    assert (change.at_token, change.of_tokens) == (at, len(prompt))
    assert len(BODY) - 4200 < change.lost_tokens <= len(BODY)
    assert change.now[:at] == tuple(SYSTEM)
    assert tuple(prompt[: len(change.now)]) == change.now
    assert change.shows_begin
    assert prompts.note(SESSION, prompt + text(8, 100)) is None, "it grew"


def test_a_change_late_in_a_prompt_shows_what_is_around_it() -> None:
    prompts = SessionPrompts()
    prompts.note(SESSION, [*BODY[:20_000], 1, *BODY[20_000:]])
    change = prompts.note(SESSION, [*BODY[:20_000], 2, *BODY[20_000:]])
    assert change is not None
    assert change.at_token == 20_000
    assert not change.shows_begin
    at = change.now.index(2)
    assert change.now[:at] == change.earlier[:at] == tuple(BODY[20_000 - at : 20_000])
    assert change.earlier[at] == 1


def test_growth_other_conversations_and_short_ends_are_no_changes() -> None:
    prompts = SessionPrompts()
    other = SYSTEM + text(20, 9_000)
    for prompt in (
        SYSTEM + BODY,
        other,  # a sub-agent with the same beginning
        SYSTEM + BODY + text(9, 500),
        other + text(10, 500),
        SYSTEM + BODY[:-LEAST_LOST_TOKENS],  # a retry of an earlier turn
        SYSTEM + BODY + text(11, 900),  # another response to it
        [*SYSTEM, *BODY[:-200], 5, *BODY[-200:]],  # little is lost
        [],
        [1],
    ):
        assert prompts.note(SESSION, prompt) is None


def test_sessions_are_kept_apart() -> None:
    prompts = SessionPrompts()
    for number in range(4):
        key = (*SESSION[:3], f"s{number}")
        assert prompts.note(key, [number, *BODY]) is None


def test_a_deleted_tenant_has_no_prompts() -> None:
    prompts = SessionPrompts()
    prompts.note(SESSION, [1, *BODY])
    prompts.note(("other", *SESSION[1:]), [1, *BODY])
    prompts.forget("tenant")
    assert prompts.note(SESSION, [2, *BODY]) is None
    assert prompts.note(("other", *SESSION[1:]), [2, *BODY]) is not None


def test_memory_is_bounded() -> None:
    """By the size of all prompts, and by eight for each session."""
    prompts = SessionPrompts(most_bytes=4 * 10_000)
    for number in range(9):
        prompts.note((f"t{number}",), text(number, 2_000))
    assert prompts.note(("t0",), [1, *text(0, 2_000)]) is None, "forgotten"
    assert prompts.note(("t8",), [1, *text(8, 2_000)]) is not None
    prompts.note(("large",), text(30, 20_000))
    assert prompts.note(("large",), [1, *text(30, 20_000)]) is None, "larger than all may be"
    many = SessionPrompts()
    for number in range(9):
        many.note(SESSION, text(number, 2_000))
    assert many.note(SESSION, [1, *text(0, 2_000)]) is None
    assert many.note(SESSION, [1, *text(8, 2_000)]) is not None
