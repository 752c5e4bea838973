"""What computing costs those who come later: how busy the fleet was in the last minute."""

import pytest

from router.routing.placement.congestion import Crowding

SECOND = 10**9


def noted(crowding: Crowding, busy: list[bool], from_s: int, until_s: int) -> None:
    for at_s in range(from_s, until_s):
        crowding.note({"prefill": (sum(busy), len(busy))}, at_s * SECOND)


def test_an_idle_fleet_counts_nobody_who_comes_later() -> None:
    crowding = Crowding()
    assert crowding.wait_per_s("prefill") == 0
    noted(crowding, [False] * 8, 0, 60)
    assert crowding.wait_per_s("prefill") == 0


def test_a_fleet_that_is_busy_three_quarters_of_the_time_counts_three_seconds() -> None:
    crowding = Crowding()
    noted(crowding, [True, True, True, False], 0, 600)
    assert crowding.busy_share("prefill") == pytest.approx(0.75, abs=0.001)
    assert crowding.wait_per_s("prefill") == pytest.approx(3, abs=0.05)
    assert crowding.wait_per_s("decode") == 0, "a role of its own"
    noted(crowding, [False] * 4, 600, 1200)
    assert crowding.wait_per_s("prefill") < 0.001


def test_the_first_prompts_of_a_router_do_not_make_a_minute_busy() -> None:
    crowding = Crowding()
    crowding.note({"prefill": (4, 4)}, 10_000 * SECOND)
    assert crowding.wait_per_s("prefill") == 0
    noted(crowding, [True, False], 10_001, 10_010)
    assert crowding.busy_share("prefill") == pytest.approx(0.5 * 9 / 12, abs=0.06)


def test_overload_is_bounded() -> None:
    crowding = Crowding()
    noted(crowding, [True], 0, 1000)
    assert crowding.wait_per_s("prefill") == pytest.approx(9)


def test_what_prompts_find_cached_is_the_price_of_displacing_it() -> None:
    crowding = Crowding()
    for _ in range(400):
        crowding.placed(prompt_tokens=1000, uncached_tokens=250, continued_share=0.0)
    assert crowding.wait_per_s("prefill") == pytest.approx(0.75, abs=0.01)
    for _ in range(400):
        crowding.placed(prompt_tokens=1000, uncached_tokens=1000, continued_share=0.0)
    assert crowding.wait_per_s("prefill") == pytest.approx(0, abs=0.01)


def test_a_burst_counts_for_the_time_it_takes() -> None:
    crowding = Crowding()
    noted(crowding, [False], 0, 60)
    for number in range(1000):
        crowding.note({"prefill": (1, 1)}, 60 * SECOND + number)
    assert crowding.busy_share("prefill") < 0.02


def test_sessions_that_continue_are_displaced_again_by_what_they_compute_again() -> None:
    """The price does not fall with the cached share, or displacing would become cheaper."""
    crowding = Crowding()
    crowding.placed(1000, 1000, continued_share=2 / 3)
    assert crowding.wait_per_s("decode", continues=True) == pytest.approx(2)
    assert crowding.wait_per_s("decode") < 0.01, "a session that begins"
    crowding.placed(1000, 1000, continued_share=1.0)
    assert crowding.wait_per_s("decode", continues=True) == pytest.approx(4), "it is bounded"
