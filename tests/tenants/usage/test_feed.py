"""Reports of a process, one after another."""

import asyncio

import pytest

from baton.registry.redis_store import RegistryUnavailableError
from baton.tenants.usage import feed
from baton.tenants.usage.feed import UsageFeed
from baton.tenants.usage.ledger import Ledger, RowName, UsageReport

TEAM = RowName(500_000, "team", "", "model")


class Sink:
    """Redis that answers late, or not."""

    def __init__(self) -> None:
        self.known = 0
        self.at_once = self.most_at_once = 0
        self.away = False

    async def apply(self, report: UsageReport, price_per_hour: float | None = None) -> int:
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        await asyncio.sleep(0.01)
        self.at_once -= 1
        if self.away:
            raise RegistryUnavailableError("away")
        known, self.known = self.known, report.sequence
        return known


async def test_two_readers_do_not_report_at_once() -> None:
    sink = Sink()
    made = UsageFeed(Ledger("one"), sink, pytest.fail)
    made.ledger.row(TEAM).requests += 1

    async def flush() -> None:
        made.ledger.row(TEAM).requests += 1
        await made.flush()

    await asyncio.gather(*(flush() for _ in range(5)))
    assert sink.most_at_once == 1
    assert made.ledger.unreported_rows == 0


async def test_a_stop_without_redis_is_told(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    sink.away = True
    made = UsageFeed(Ledger("one"), sink, pytest.fail, interval_s=0.01)
    made.ledger.row(TEAM).requests += 1
    made.start()
    await asyncio.sleep(0.1)
    await made.close()
    assert caplog.text.count("keeping usage until Redis answers: away") == 1
    assert "lost usage: rows=1: away" in caplog.text


async def test_rows_are_checked_without_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis that restarts empty gets the rows of an idle router."""
    monkeypatch.setattr(feed, "_CHECK_S", 0.0)
    sink = Sink()
    made = UsageFeed(Ledger("one"), sink, pytest.fail)
    hour = int(feed.time.time()) // 3600
    made.ledger.row(TEAM._replace(hour=hour)).requests += 1
    await made.flush()
    sink.known = 0
    await made.flush()
    assert sink.known == 3, "the second report was refused, and the third has all rows"
