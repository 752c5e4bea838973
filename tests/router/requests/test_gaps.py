"""The longest waits of an answer are kept, and what is usual is told without them."""

import pytest

from router.routing.requests.token_gaps import KEPT_GAPS, TokenGaps


def test_the_longest_are_kept_in_order() -> None:
    gaps = TokenGaps()
    for index, gap_s in enumerate([0.02, 0.9, 0.02, 0.5, 0.02, 0.7, 0.02]):
        gaps.add(gap_s, 1, index + 1, index)
    assert [gap.seconds for gap in gaps.longest] == [0.9, 0.7, 0.5]
    assert gaps.longest[0].before_token == 2
    assert len(gaps.longest) == KEPT_GAPS
    assert gaps.usual_s == pytest.approx(0.02)


def test_few_gaps_are_all_usual() -> None:
    gaps = TokenGaps()
    assert (gaps.usual_s, gaps.longest) == (0.0, ())
    gaps.add(0.03, 2, 1, 0)
    assert gaps.usual_s == pytest.approx(0.03)
