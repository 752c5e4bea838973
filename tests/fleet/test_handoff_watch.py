"""A fleet whose hand-offs all fail says so, once, and says when they work again."""

from fleet.local.handoff_watch import HandoffState, Transfers


def told(*totals: tuple[int, int]) -> list[str]:
    state = HandoffState()
    return [line for one in totals if (line := state.note(Transfers(*one)))]


def test_hand_offs_that_work_or_are_not_needed_are_no_news() -> None:
    assert told((0, 0), (0, 0), (9, 0), (9, 0)) == []
    assert told((0, 100), (1, 140), (2, 190)) == [], "some fail: an alert has the share"
    assert told((5, 0), (5, 4), (6, 5), (6, 9)) == [], "too few to judge"


def test_a_fleet_where_all_fail_says_so_once() -> None:
    (line,) = told((0, 0), (0, 4), (0, 12), (0, 90))
    assert line.startswith("warning: all KV hand-offs fail (12 since the last success)")
    first, second = told((7, 2), (7, 30), (7, 40), (8, 41), (9, 41))
    assert "(28 since" in first and second == "KV hand-offs work again"


def test_sums_that_start_anew_are_a_new_beginning() -> None:
    assert told((7, 90), (0, 0), (0, 4)) == []
