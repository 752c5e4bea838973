"""Issued keys of two routers against a model: changes, lost Redis, old copies, time."""

import asyncio
import random
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.registry.redis_store import RegistryUnavailableError
from baton.tenants.key_record import (
    FORGET_AFTER_MS,
    KEY,
    KeyRecord,
    decoded,
    issue,
    joined,
    new_key,
)
from baton.tenants.shared_keys import Change, KeysSummary
from router.tenants.key_exchange import KeyChangeError, KeyExchange, UnknownKeyError
from router.tenants.key_table import DAY_MS, KeyTable
from tests.soak import examples

HOUR_MS = 3600 * 1000
TEAM = {"tenant": "team"}
TEXTS = [new_key() for _ in range(12)]


@dataclass
class FakeRedis:
    """The calls of ``SharedKeys`` on a dictionary that can be lost, restored, and away."""

    raws: dict[str, bytes] = field(default_factory=dict)
    mark: bytes = b""
    log: list[tuple[bytes, set[str]]] = field(default_factory=list)
    now_ms: int = 0
    away: bool = False
    puts: int = 0

    def check(self) -> None:
        if self.away:
            raise RegistryUnavailableError("by design")

    async def summary(self) -> KeysSummary:
        self.check()
        return KeysSummary(self.mark, len(self.raws), self.now_ms)

    async def changed(self, since: bytes, until: bytes) -> set[str] | None:
        self.check()
        marks = [mark for mark, _ in self.log]
        if since not in marks or marks[0] != until:
            return None
        return {name for _, ids in self.log[: marks.index(since)] for name in ids}

    async def some(self, ids) -> dict[str, bytes]:
        self.check()
        return {name: self.raws[name] for name in ids if name in self.raws}

    async def records(self):
        self.check()
        yield dict(self.raws)

    async def put(self, changes: list[Change], until_ms: int = 0) -> bool:
        self.check()
        if any(self.raws.get(record.id, b"") != expected for expected, record in changes):
            return False
        self.raws |= {record.id: msgspec.json.encode(record) for _, record in changes}
        self._mark()
        self.log = [(self.mark, {record.id for _, record in changes}), *self.log[:2]]
        return True

    async def drop(self, ids) -> None:
        for key_id in ids:
            self.raws.pop(key_id, None)
        self._mark()

    async def note_used(self, days) -> None:
        self.check()

    def skip(self, key_id: str, reason: str) -> None:
        raise AssertionError(f"{key_id}: {reason}")

    def _mark(self) -> None:
        self.puts += 1
        self.mark = random.randbytes(8)


@dataclass
class Expected:
    """State of one key by the orders of the operators."""

    expires_ms: int
    retires_ms: int = 0
    revoked: bool = False
    replaced: bool = False

    def valid(self, now_ms: int) -> bool:
        ends = [ms for ms in (self.expires_ms, self.retires_ms) if ms]
        return not self.revoked and all(ms > now_ms for ms in ends)


class Routers(RuleBasedStateMachine):
    """Router 0 remembers everything; router 1 may restart with any copy that it ever had."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.redis = FakeRedis()
        self.now_ms = self.redis.now_ms = 10**12
        self.routers = [KeyExchange(KeyTable(), self.redis) for _ in range(2)]
        self.expected: dict[str, Expected] = {}
        self.texts: dict[str, str] = {}
        self.copies: list[list[KeyRecord]] = [[]]
        self.snapshots = [({}, b"", [])]

    def teardown(self) -> None:
        self.redis.away = False
        for router in (*self.routers, *self.routers):
            self.run(router.exchange())
        assert self.accepted(self.routers[0].table) == self.accepted(self.routers[1].table)
        assert set(self.redis.raws) == {key.record.id for key in self.routers[0].table}
        puts = self.redis.puts
        for router in self.routers:
            self.run(router.exchange())
        assert self.redis.puts == puts, "routers that agree write nothing"
        self.loop.close()

    def run(self, work):
        return self.loop.run_until_complete(work)

    def change(self, router: int, work) -> bool:
        """Return whether the change was made; without Redis it is not."""
        try:
            self.run(work)
        except RegistryUnavailableError:
            assert self.redis.away
            return False
        assert not self.redis.away
        self.run(self.routers[0].exchange())
        return True

    def accepted(self, table: KeyTable) -> set[str]:
        return {
            key_id
            for key_id, text in self.texts.items()
            if (key := table.find(text)) is not None and key.record.state(self.now_ms) == "valid"
        }

    @precondition(lambda self: len(self.texts) < len(TEXTS))
    @rule(router=st.sampled_from((0, 1)), hours=st.sampled_from((0, 1, 30, 2000)))
    def create(self, router: int, hours: int) -> None:
        text = TEXTS[len(self.texts)]
        expires_ms = self.now_ms + hours * HOUR_MS if hours else 0
        record = issue(text, TEAM, created_ms=self.now_ms, expires_ms=expires_ms)
        if self.change(router, self.routers[router].add([record])):
            self.texts[record.id] = text
            self.expected[record.id] = Expected(expires_ms)

    @precondition(lambda self: 0 < len(self.texts) < len(TEXTS))
    @rule(router=st.sampled_from((0, 1)), which=st.integers(0, 99), hours=st.integers(0, 3))
    def rotate(self, router: int, which: int, hours: int) -> None:
        old_id = list(self.texts)[which % len(self.texts)]
        expected = self.expected[old_id]
        text = TEXTS[len(self.texts)]
        new = issue(text, TEAM, created_ms=self.now_ms)
        retires_ms = self.now_ms + hours * HOUR_MS

        def edit(old: KeyRecord) -> KeyRecord:
            if old.replaced_by:
                raise KeyChangeError("replaced")
            return msgspec.structs.replace(old, replaced_by=new.id, retires_ms=retires_ms)

        raw = self.redis.raws.get(old_id)
        told = raw is not None and bool(decoded(raw).replaced_by)
        try:
            done = self.change(router, self.routers[router].change(old_id, edit, lambda _: new))
        except UnknownKeyError:
            self.check_unknown(router, old_id)
            return
        except KeyChangeError:
            assert expected.replaced
            return
        if done:
            # router 1 cannot know of a replacement that Redis has lost
            assert not expected.replaced or (router == 1 and not told)
            expected.replaced = True
            expected.retires_ms = min(expected.retires_ms or retires_ms, retires_ms)
            self.texts[new.id] = text
            self.expected[new.id] = Expected(0)

    @precondition(lambda self: self.texts)
    @rule(router=st.sampled_from((0, 1)), which=st.integers(0, 99))
    def revoke(self, router: int, which: int) -> None:
        key_id = list(self.texts)[which % len(self.texts)]
        now_ms = self.now_ms

        def edit(old: KeyRecord) -> KeyRecord:
            return msgspec.structs.replace(old, revoked_ms=now_ms)

        try:
            if self.change(router, self.routers[router].change(key_id, edit)):
                self.expected[key_id].revoked = True
        except UnknownKeyError:
            self.check_unknown(router, key_id)

    def check_unknown(self, router: int, key_id: str) -> None:
        """Only an expired key is forgotten, or one that Redis lost before it came to router 1."""
        lost = router == 1 and key_id not in self.redis.raws
        assert lost or not self.expected[key_id].valid(self.now_ms)

    @rule(hours=st.sampled_from((1, 20, 800)))
    def wait(self, hours: int) -> None:
        self.now_ms += hours * HOUR_MS
        self.redis.now_ms = self.now_ms

    @rule(router=st.sampled_from((0, 1)))
    def exchange(self, router: int) -> None:
        try:
            self.run(self.routers[router].exchange())
        except RegistryUnavailableError:
            return
        self.copies.append([key.record for key in self.routers[1].table])

    @rule()
    def redis_goes_away_or_returns(self) -> None:
        self.redis.away = not self.redis.away

    @rule(which=st.integers(0, 99))
    def redis_loses_a_record(self, which: int) -> None:
        if self.redis.raws:
            del self.redis.raws[list(self.redis.raws)[which % len(self.redis.raws)]]

    @rule()
    def redis_is_saved(self) -> None:
        self.snapshots.append((dict(self.redis.raws), self.redis.mark, list(self.redis.log)))

    @rule(which=st.integers(0, 99))
    def redis_restarts_with_old_data(self, which: int) -> None:
        raws, self.redis.mark, log = self.snapshots[which % len(self.snapshots)]
        self.redis.raws = dict(raws)
        self.redis.log = list(log)

    @rule(which=st.integers(0, 99))
    def router_1_restarts_with_an_old_copy(self, which: int) -> None:
        self.routers[1] = KeyExchange(KeyTable(), self.redis)
        for record in self.copies[which % len(self.copies)]:
            self.routers[1].table.adopt(record)

    @invariant()
    def router_0_accepts_exactly_the_valid_keys(self) -> None:
        valid = {key for key, expected in self.expected.items() if expected.valid(self.now_ms)}
        assert self.accepted(self.routers[0].table) == valid

    @invariant()
    def router_1_accepts_no_key_that_has_expired(self) -> None:
        for key_id in self.accepted(self.routers[1].table):
            assert not 0 < self.expected[key_id].expires_ms <= self.now_ms


TestRouters = Routers.TestCase
TestRouters.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


ENDS = st.sampled_from((0, 5, 7, 9))
RECORDS = st.builds(
    lambda retires, revoked, by: msgspec.structs.replace(
        issue(TEXTS[0], TEAM, created_ms=1, expires_ms=8),
        retires_ms=retires,
        revoked_ms=revoked,
        replaced_by=by,
    ),
    ENDS,
    ENDS,
    st.sampled_from(("", "aaaaaaaaaaaa", "bbbbbbbbbbbb")),
)


@given(RECORDS, RECORDS, RECORDS)
def test_copies_agree_in_any_order_and_no_end_is_put_off(one, two, three) -> None:
    assert joined(one, two) == joined(two, one)
    assert joined(joined(one, two), three) == joined(one, joined(two, three))
    assert joined(one, one) == one
    order = ("valid", "expired", "revoked")
    for now_ms in range(11):
        both = joined(one, two).state(now_ms)
        assert order.index(both) == max(order.index(r.state(now_ms)) for r in (one, two))


@given(RECORDS)
def test_a_record_is_the_same_after_json(record) -> None:
    assert decoded(msgspec.json.encode(record)) == record


def test_a_key_is_random_and_its_record_has_no_secret() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == len({KEY.fullmatch(key)[1] for key in keys}) == 100
    for key in keys:
        record = issue(key, TEAM)
        assert record.id == key[3:15] and not record.by_hash
        raw = msgspec.json.encode(record).decode()
        assert key[16:] not in raw and key not in raw


def test_a_key_is_found_by_its_whole_text_alone() -> None:
    table = KeyTable()
    table.adopt(issue(TEXTS[0], TEAM))
    table.adopt(issue("sk-imported-1", TEAM))
    assert table.find(TEXTS[0]).record.id == TEXTS[0][3:15]
    imported = table.find("sk-imported-1")
    assert imported.record.by_hash and imported.record.id == imported.record.sha256[:12]
    same_id = TEXTS[0][:16] + TEXTS[1][16:]
    broken = (TEXTS[0][:-1], TEXTS[0] + "0", TEXTS[0].upper(), " " + TEXTS[0], TEXTS[0] + "\n")
    for wrong in ("", "bt-", "é", "\0", imported.record.sha256, "x" * 10**6, same_id, *broken):
        assert table.find(wrong) is None, wrong[:100]


def test_nothing_is_hashed_that_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    table = KeyTable()
    table.adopt(issue(TEXTS[0], TEAM))
    monkeypatch.setattr("router.tenants.key_table.hash_of", lambda _: pytest.fail("it was hashed"))
    for wrong in ("", "bt-aaaaaaaaaaaa-0", "sk-1234567890", TEXTS[0] + "0"):
        assert table.find(wrong) is None


def test_a_forgotten_key_leaves_no_trace() -> None:
    table = KeyTable()
    rights = {**TEAM, "log_text": True}
    table.adopt(issue("sk-imported-1", rights, created_ms=1, expires_ms=DAY_MS))
    assert table.logs_text("team", 2) and table.of_tenant("team", 2).tenant == "team"
    assert not table.logs_text("team", DAY_MS) and table.of_tenant("team", DAY_MS) is None
    assert table.forget(DAY_MS + FORGET_AFTER_MS) == []
    assert len(table.forget(DAY_MS + FORGET_AFTER_MS + 1)) == 1
    assert len(table) == 0 and table.find("sk-imported-1") is None
    assert not table.logs_text("team", 2) and table.of_tenant("team", 2) is None


def test_rights_of_another_version_open_nothing() -> None:
    table = KeyTable()
    assert table.adopt(issue(TEXTS[0], {"tenant": "team", "later": 1})) is None
    assert table.find(TEXTS[0]) is None
    assert list(table.unreadable) == [TEXTS[0][3:15]]


def test_a_day_of_use_is_noted_once() -> None:
    table = KeyTable()
    key = table.adopt(issue(TEXTS[0], TEAM))
    table.note_use(key, 5 * DAY_MS)
    assert table.used == {key.record.id: 5}
    table.used = {}
    table.note_use(key, 6 * DAY_MS - 1)
    assert table.used == {}
    table.note_use(key, 6 * DAY_MS)
    assert table.used == {key.record.id: 6}
