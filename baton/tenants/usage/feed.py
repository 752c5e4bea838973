"""Reports of a process's usage to Redis, at fixed intervals and when the process stops."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from baton.registry.redis_store import RegistryUnavailableError
from baton.telemetry.tasks import BackgroundTasks
from baton.tenants.usage.ledger import HOUR_S, Ledger
from baton.tenants.usage.shared import SharedUsage

_LOG = logging.getLogger(__name__)

_CLOSE_S = 2.0  # time limit of the last reports
_CHECK_S = 60.0  # without changes, Redis is asked this often whether it still has the rows


class UsageFeed:
    """Ledger of a process, and the task that reports it.

    Args:
        sink: Usage in Redis; None: the process counts only for itself.
        interval_s: Time between two reports, which is what a killed process loses at most.
        price_per_hour: Price of one worker for one hour; None: another process reports it.
        before_report: Adds to the ledger before each report, the last one included.

    Attributes:
        keep: Receives the ledger's life and rows if Redis cannot receive the last report; None:
            what it lacks is lost.
    """

    def __init__(
        self,
        ledger: Ledger,
        sink: SharedUsage | None,
        count_failure: Callable[[str], None],
        *,
        interval_s: float = 1.0,
        price_per_hour: float | None = None,
        before_report: Callable[[Ledger], None] = lambda _: None,
    ) -> None:
        self.ledger = ledger
        self._sink = sink
        self._interval_s = interval_s
        self._price_per_hour = price_per_hour
        self._before_report = before_report
        self._tasks = BackgroundTasks("usage", count_failure)
        self._lock = asyncio.Lock()  # a ledger has one report on its way
        self._failing = False
        self._checked_s = 0.0  # monotonic
        self.keep: Callable[[str, dict[int, dict[str, str]]], Awaitable[None]] | None = None

    def start(self) -> None:
        """Start reporting. Needs a running event loop."""
        if self._sink is not None:
            self._tasks.keep(self._run, "usage")

    async def close(self) -> None:
        """Stop the task, and report what is left."""
        await self._tasks.close()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.flush()
        except (RegistryUnavailableError, TimeoutError) as error:
            rows = self.ledger.unreported_rows
            if self.keep is None:
                _LOG.error("lost usage: rows=%d: %s", rows, str(error))
            else:
                await self.keep(self.ledger.life, self.ledger.fields())
                _LOG.warning("kept usage in the state folder: rows=%d: %s", rows, str(error))

    async def flush(self) -> None:
        """Report what Redis may lack.

        Raises:
            RegistryUnavailableError: Redis did not answer; the ledger keeps what it may lack.
        """
        if self._sink is None:
            return
        async with self._lock:
            await self._flush(self._sink)

    async def _flush(self, sink: SharedUsage) -> None:
        self._before_report(self.ledger)
        always = time.monotonic() > self._checked_s + _CHECK_S
        more = True
        while more:
            report = self.ledger.report(int(time.time()) // HOUR_S, always=always)
            if report is None:
                return
            known = await sink.apply(report, self._price_per_hour)
            more = self.ledger.answered(report, known)
            always = False
            self._checked_s = time.monotonic()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.flush()
            except RegistryUnavailableError as error:
                if not self._failing:
                    _LOG.warning("keeping usage until Redis answers: %s", str(error))
                self._failing = True
            else:
                self._failing = False
