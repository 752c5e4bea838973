"""Sessions in front of attached servers that hold half of them, in virtual time."""

from statistics import fmean

import pytest

from tests.router.placement.attached_servers import RATE, World


@pytest.fixture(scope="module")
def worlds() -> list[World]:
    return [World(seed) for seed in range(8)]


def test_each_server_reports_its_rate_although_it_evicts_what_waiting_prompts_need(worlds):
    """One of four looked half as fast, and stood idle while prompts queued at the others."""
    for world in worlds:
        assert [1 / token_s for token_s in world.token_s()] == pytest.approx([RATE] * 4, rel=0.05)


def test_sessions_stay_where_their_prefix_is(worlds):
    """At most 71 % can be cached, if all is held."""
    assert fmean(world.cached_share for world in worlds) >= 0.59
    assert fmean(world.ttft_s(0.5) for world in worlds) <= 0.06
    assert fmean(world.ttft_s(0.9) for world in worlds) <= 0.19
    assert fmean(world.ttft_s(0.99) for world in worlds) <= 0.5, "long queues evict prefixes"
