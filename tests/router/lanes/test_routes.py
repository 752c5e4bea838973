"""The table of routes: shares, stickiness, tenants, fallbacks, and every sequence of changes."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.types.routes import NameRoute, RouteTable
from baton.types.versioned import TableChangeError
from router.lanes.routes import (
    Route,
    models_of,
    promoted,
    rolled_back,
    route,
    with_alias,
    with_canary,
    with_fallbacks,
    without,
)
from tests.soak import examples


def of(
    table: RouteTable,
    name: str = "chat",
    conversation: str = "hi",
    tenant: str = "t",
    down: tuple[str, ...] = (),
    **more: bool,
) -> Route:
    return route(table, name, tenant, lambda: conversation, lambda one: one not in down, **more)


STABLE = with_alias(RouteTable(), "chat", "v1")


def canary(share: float, table: RouteTable = STABLE) -> RouteTable:
    return with_canary(table, "chat", "v2", share=share)


def test_a_name_without_an_entry_is_its_own_model() -> None:
    assert of(RouteTable(), "v1") == Route("v1", "named", "", "v1")
    assert of(STABLE) == Route("v1", "alias", "", "chat")


def test_a_share_is_within_a_point_over_10000_conversations() -> None:
    for share in (0.01, 0.05, 0.2, 0.5):
        table = canary(share)
        found = sum(of(table, conversation=f"c{n}").model == "v2" for n in range(10_000))
        assert abs(found / 10_000 - share) < 0.01


def test_no_conversation_of_1000_changes_its_version_but_by_rollback() -> None:
    table = canary(0.3)
    first = {n: of(table, conversation=f"c{n}").model for n in range(1000)}
    for share in (0.3, 0.4, 0.9):  # a larger share takes no conversation away from the canary
        table = canary(share, table)
        for n, model in first.items():
            now = of(table, conversation=f"c{n}").model
            assert model in ("v1", now) if share > 0.3 else now == model
            assert now in ("v1", "v2")
            if model == "v2":
                assert now == "v2"
    back = rolled_back(table, "chat")
    assert {of(back, conversation=f"c{n}").model for n in range(1000)} == {"v1"}


def test_the_same_words_of_two_tenants_are_two_conversations() -> None:
    table = canary(0.5)
    for n in range(64):
        models = {of(table, tenant=f"tenant-{n}").model for _ in range(3)}
        assert len(models) == 1
    assert len({of(table, tenant=f"tenant-{n}").model for n in range(64)}) == 2


def test_every_answer_says_why_and_what_to_roll_back_to() -> None:
    table = canary(0.05)
    reasons = {of(table, conversation=f"c{n}") for n in range(1000)}
    assert reasons == {
        Route("v2", "canary 5 %", "v1", "chat"),
        Route("v1", "stable 95 %", "", "chat"),
    }
    assert of(promoted(table, "chat")) == Route("v2", "alias", "v1", "chat")


def test_a_tenant_gets_the_canary_whatever_its_conversation() -> None:
    table = with_canary(STABLE, "chat", "v2", tenants=("beta",))
    assert {of(table, tenant="beta", conversation=f"c{n}") for n in range(100)} == {
        Route("v2", "tenant", "v1", "chat")
    }
    assert {of(table, tenant="other", conversation=f"c{n}").model for n in range(100)} == {"v1"}


def test_a_canary_without_a_worker_gives_its_requests_back() -> None:
    table = canary(1.0)
    assert of(table, down=("v2",)) == Route("v1", "rollback: v2 has no ready worker", "", "chat")
    assert of(table, down=("v1", "v2")).model == "v2"


def test_a_fallback_answers_only_if_the_client_allows_it() -> None:
    table = with_fallbacks(STABLE, "chat", ("v0", "small"))
    assert of(table, down=("v1",)).model == "v1"
    found = of(table, down=("v1", "v0"), may_fall_back=True)
    assert found == Route("small", "fallback: v1 has no ready worker", "v1", "chat")
    assert of(table, may_fall_back=True).model == "v1"
    assert of(table, down=("v1", "v0", "small"), may_fall_back=True).model == "v1"


def test_a_model_can_have_a_canary_under_its_own_name() -> None:
    table = with_canary(RouteTable(), "v1", "v2", share=1.0)
    assert of(table, "v1").model == "v2"
    assert of(promoted(table, "v1"), "v1") == Route("v2", "alias", "v1", "v1")
    assert rolled_back(promoted(table, "v1"), "v1") == RouteTable()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda: with_canary(STABLE, "chat", "v1", share=0.1), "already answers all"),
        (lambda: with_canary(STABLE, "chat", "v2"), "needs a share or tenants"),
        (lambda: with_canary(STABLE, "chat", "v2", share=1.5), r"got 150 %"),
        (lambda: with_canary(canary(0.1), "chat", "v3", share=0.1), "has the canary v2"),
        (lambda: with_alias(canary(0.1), "chat", "v3"), "has the canary v2"),
        (lambda: promoted(STABLE, "chat"), "no canary to promote"),
        (lambda: rolled_back(STABLE, "chat"), "nothing to roll back"),
        (lambda: without(STABLE, "x"), "is not an alias"),
    ],
)
def test_changes_that_make_no_sense_are_refused(change, problem: str) -> None:
    with pytest.raises(TableChangeError, match=problem):
        change()


@given(st.text(max_size=30), st.text(max_size=30), st.floats(0, 1))
def test_any_text_has_a_route(name: str, conversation: str, share: float) -> None:
    table = RouteTable(1, {name: NameRoute(target="a", canary="b", share=share)})
    assert of(table, name, conversation).model in ("a", "b")


NAMES = st.sampled_from(("chat", "v1", "v2", "v3"))
SHARES = st.sampled_from((0.0, 0.05, 0.5, 1.0))


class Changes(RuleBasedStateMachine):
    """Any sequence of changes; a refused one changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RouteTable()

    def _try(self, change) -> bool:
        before = self.table
        try:
            self.table = change(before)
        except TableChangeError:
            assert self.table is before
            return False
        return True

    @rule(name=NAMES, model=NAMES)
    def alias(self, name: str, model: str) -> None:
        if self._try(lambda table: with_alias(table, name, model)):
            assert of(self.table, name).model == model

    @rule(name=NAMES, canary=NAMES, share=SHARES)
    def canary(self, name: str, canary: str, share: float) -> None:
        stable = of(rolled_back_if(self.table, name), name).model
        if self._try(lambda table: with_canary(table, name, canary, share=share)):
            assert of(self.table, name).model in (stable, canary)

    @rule(name=NAMES)
    def promote(self, name: str) -> None:
        entry = self.table.names.get(name)
        if self._try(lambda table: promoted(table, name)):
            assert entry is not None
            assert of(self.table, name).model == entry.canary
            assert of(self.table, name).rollback_to == entry.target

    @rule(name=NAMES)
    def rollback(self, name: str) -> None:
        entry = self.table.names.get(name)
        if self._try(lambda table: rolled_back(table, name)):
            assert entry is not None
            assert of(self.table, name).model == (entry.target if entry.canary else entry.previous)

    @invariant()
    def the_stable_model_is_what_a_rollback_leads_to(self) -> None:
        for name, entry in self.table.names.items():
            assert entry.target and entry.canary != entry.target
            assert bool(entry.canary) == bool(entry.share or entry.tenants)
            assert of(self.table, name).model in models_of(entry)
            assert of(self.table, name, down=(entry.canary,)).model == entry.target


def rolled_back_if(table: RouteTable, name: str) -> RouteTable:
    entry = table.names.get(name)
    return rolled_back(table, name) if entry is not None and entry.canary else table


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
